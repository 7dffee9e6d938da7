# rangecache's image: one static binary and nothing else. For one or more platforms:
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg REVISION="$(git rev-parse HEAD)" .
# Cross-compiles, so that no platform is emulated.
ARG RUST_IMAGE=docker.io/library/rust:1.95-bookworm

FROM --platform=$BUILDPLATFORM ${RUST_IMAGE} AS build
# Set by the builder; a plain build uses the builder's own platform.
ARG TARGETARCH
WORKDIR /src
COPY . .
# glibc and not musl, linked statically: it copies small values three times as fast, and responses are made of copies.
# jemalloc must be built for the largest page size of any kernel: 64 KiB on arm64.
RUN set -eu; \
    arch="${TARGETARCH:-$(dpkg --print-architecture)}"; \
    case "$arch" in \
      amd64) cpu=x86_64 ;; \
      arm64) cpu=aarch64; export JEMALLOC_SYS_WITH_LG_PAGE=16 ;; \
      *) echo "no build for $arch" >&2; exit 1 ;; \
    esac; \
    target="$cpu-unknown-linux-gnu"; \
    if [ "$arch" != "$(dpkg --print-architecture)" ]; then \
      apt-get update; \
      apt-get install --yes --no-install-recommends "gcc-$(echo $cpu | tr _ -)-linux-gnu" "libc6-dev-$arch-cross"; \
      rustup target add "$target"; \
    fi; \
    name="$(echo $target | tr a-z- A-Z_)"; \
    export "CARGO_TARGET_${name}_LINKER=$cpu-linux-gnu-gcc"; \
    export "CARGO_TARGET_${name}_RUSTFLAGS=-C target-feature=+crt-static"; \
    export "CC_$(echo $target | tr - _)=$cpu-linux-gnu-gcc"; \
    export CARGO_PROFILE_RELEASE_STRIP=debuginfo; \
    cargo build --locked --release --bin rangecache --target "$target"; \
    mkdir -p /out/etc; \
    cp "target/$target/release/rangecache" LICENSE /out/; \
    echo 'rangecache:x:65532:65532::/:/nologin' > /out/etc/passwd; \
    echo 'rangecache:x:65532:' > /out/etc/group; \
    if ldd /out/rangecache 2>/dev/null | grep -q '=>'; then echo 'the binary is not static' >&2; exit 1; fi

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="rangecache" \
      org.opencontainers.image.description="A transparent caching gRPC proxy in front of etcd" \
      org.opencontainers.image.source="https://github.com/rangecache/rangecache" \
      org.opencontainers.image.documentation="https://github.com/rangecache/rangecache#deploy" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/ /
# A number, so that Kubernetes can verify that it is not root.
USER 65532:65532
EXPOSE 23790 23791
ENTRYPOINT ["/rangecache"]
