# rangecache's image: one static binary, the CAs of the distribution, and nothing else. For one or more platforms:
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg REVISION="$(git rev-parse HEAD)" .
# Cross-compiles, so that no platform is emulated. A release gives the folder of its own binaries in place of the stage `build`.
ARG RUST_IMAGE=docker.io/library/rust:1.95.0-bookworm

FROM --platform=$BUILDPLATFORM ${RUST_IMAGE} AS build
# Set by the builder; a plain build uses the builder's own platform.
ARG TARGETARCH
# Shown by --version and rangecache_build_info: the git tree is not copied.
ARG REVISION=
WORKDIR /src
COPY . .
# The distribution's cross compiler, if the image is for another architecture than the builder's.
RUN set -eu; \
    arch="${TARGETARCH:-$(dpkg --print-architecture)}"; \
    if [ "$arch" != "$(dpkg --print-architecture)" ]; then \
      case "$arch" in amd64) cpu=x86-64 ;; arm64) cpu=aarch64 ;; *) cpu="$arch" ;; esac; \
      apt-get update; \
      apt-get install --yes --no-install-recommends "gcc-$cpu-linux-gnu" "libc6-dev-$arch-cross"; \
      rm -rf /var/lib/apt/lists/*; \
    fi; \
    RANGECACHE_BUILD_COMMIT="$REVISION" packaging/build-static "$arch" /built; \
    packaging/image-root /built/rangecache "/out/$TARGETARCH"

FROM scratch
ARG TARGETARCH
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="rangecache" \
      org.opencontainers.image.description="A transparent caching gRPC proxy in front of etcd" \
      org.opencontainers.image.source="https://github.com/rangecache/rangecache" \
      org.opencontainers.image.documentation="https://github.com/rangecache/rangecache#deploy" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/$TARGETARCH/ /
# A number, so that Kubernetes can verify that it is not root.
USER 65532:65532
EXPOSE 23790 23791
# For Docker and Compose; Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m CMD ["/rangecache", "health", "--ready"]
ENTRYPOINT ["/rangecache"]
