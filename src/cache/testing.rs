//! Makers of entries for the tests of this room.
