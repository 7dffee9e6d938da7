//! The Huffman code of HPACK (RFC 7541, appendix B), for text that etcd sends: ASCII without control characters.
//!
//! The code is canonical: codes of the same length are consecutive numbers in the order of their symbols, and the first of a length
//! follows from the number of shorter ones.

/// Number of codes of 5, 6, … 19 bits.
const CODES: [u32; 15] = [10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3];
/// Length of the shortest code in bits.
const SHORTEST: u32 = 5;
/// Symbols in the order of their codes. Each symbol that is not here has a longer code.
const SYMBOLS: [u8; 98] = *b"012aceiost %-./3456789=A_bdfghlmnpru:BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz&*,;XZ!\"()?'+|#>\0$@[]~^}<`{\\\xc3\xd0";

/// Decodes `coded` into `text`; `None` if it is not coded text, or has a symbol that etcd does not send.
pub(super) fn decode(coded: &[u8], text: &mut Vec<u8>) -> Option<()> {
    // Code that has begun; the first code of its length, and the position of that one's symbol.
    let (mut code, mut bits, mut first, mut position) = (0_u32, 0_u32, 0_u32, 0_u32);
    for byte in coded {
        for bit in (0..8).rev() {
            code = code << 1 | u32::from(byte >> bit & 1);
            bits += 1;
            first <<= 1;
            let Some(length) = bits.checked_sub(SHORTEST) else {
                continue;
            };
            let codes = *CODES.get(length as usize)?;
            if code - first < codes {
                let symbol = *SYMBOLS.get((position + code - first) as usize)?;
                text.push(Some(symbol).filter(|symbol| symbol.is_ascii() && !symbol.is_ascii_control())?);
                (code, bits, first, position) = (0, 0, 0, 0);
            } else {
                first += codes;
                position += codes;
            }
        }
    }
    // Padding: fewer than eight bits of the longest code, which are ones.
    (bits < 8 && code == (1 << bits) - 1).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(coded: &[u8]) -> Option<String> {
        let mut text = Vec::new();
        decode(coded, &mut text)?;
        Some(String::from_utf8(text).unwrap())
    }

    /// Examples of RFC 7541, appendix C.
    #[test]
    fn examples_of_the_rfc_are_decoded() {
        let coded = [
            0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
        ];
        assert_eq!(decoded(&coded).unwrap(), "www.example.com");
        assert_eq!(
            decoded(&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]).unwrap(),
            "no-cache"
        );
        assert_eq!(decoded(&[0x64, 0x02]).unwrap(), "302");
        assert_eq!(decoded(&[]).unwrap(), "");
    }

    #[test]
    fn what_is_no_text_is_refused() {
        // Eight bits of padding, padding of zeros, the end of a string, NUL.
        for coded in [&[0xff_u8][..], &[0x00, 0x00], &[0xff; 4], &[0xff, 0xc7]] {
            assert_eq!(decoded(coded), None, "{coded:?}");
        }
    }
}
