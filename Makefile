# rangecache: commands to try, test and measure it. `make help` lists them.
# Needs Rust, Go, make and a C compiler; nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One build at a time: each uses every core.
.NOTPARALLEL:

GO ?= go
CARGO ?= cargo
TOOLS_DIR := target/tools
# Runs a step of a target: prints its name, and the time that it took.
timed := .ci/timed
# Make runs lines that name its own variable even under `make -n`.
self := $(MAKE) --no-print-directory
# Platform that `make sbom` describes.
SBOM_TARGET ?= x86_64-unknown-linux-gnu

# Each folder of tests/tools is a Go module that builds the tool of that name: from its own main.go, or from the main
# package that its go.mod names as a tool.
ALL_TOOLS := $(sort $(patsubst tests/tools/%/go.mod,%,$(wildcard tests/tools/*/go.mod)))
# Other etcds than the supported ones: a newer one, one below the version gate, and one without etcd's storage.
OTHER_ETCDS := etcd-3.8 etcd-3.5.12 kine
ETCD_TOOLS := $(filter-out $(OTHER_ETCDS),$(filter etcd%,$(ALL_TOOLS)))

.PHONY: help
help: ## Show this text
	@echo 'rangecache: a transparent caching gRPC proxy in front of etcd'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'ETCD_3_7, ETCD_3_6, ETCD_3_5 and ETCDCTL can each name a binary to use instead of building one.'

# --- try, test, measure ---------------------------------------------------------------------------------------------

# Always both: cargo would compile the dependencies again for the features that the tour adds to theirs. CI, which has
# compiled the tests, names them as well, for the same reason.
BINARIES ?= -p rangecache --bin rangecache -p tour --bin tour

# The profile that `make run` builds with; CI takes `dev`, whose build serves the suites in Go, too.
TOUR_PROFILE ?= tour

# With four cores or more, rangecache and etcd are built at the same time. With the user's own etcd only the proxy is built.
# ENDPOINTS=https://... takes CACERT=, CERT= and KEY=, files, as etcdctl's flags. RANGECACHE_BINARY= names a rangecache that is
# built already.
TOUR_FLAGS = $(if $(ENDPOINTS),--endpoints '$(ENDPOINTS)' $(if $(CACERT),--cacert '$(CACERT)') $(if $(CERT),--cert '$(CERT)') $(if $(KEY),--key '$(KEY)'))

.PHONY: run
run: rust-present ## Show rangecache in front of a real etcd; ENDPOINTS=http://... uses your own, also with TLS (CACERT=, CERT=, KEY=)
	@etcd() { $(if $(ENDPOINTS),true,$(self) tour-etcd); }; \
	tour() { $(timed) 'build $(if $(RANGECACHE_BINARY),the tour,rangecache and the tour)' \
	  $(CARGO) build --locked --profile $(TOUR_PROFILE) $(if $(RANGECACHE_BINARY),-p tour,$(BINARIES)); }; \
	if [ "$$(getconf _NPROCESSORS_ONLN)" -ge 4 ]; then \
	  etcd & tour || { kill $$!; wait; exit 1; }; wait $$!; \
	else \
	  etcd; tour; \
	fi
	@RANGECACHE_BINARY='$(RANGECACHE_BINARY)' exec target/$(TOUR_PROFILE:dev=debug)/tour $(TOUR_FLAGS)

.PHONY: tour-etcd
tour-etcd: $(TOOLS_DIR)/etcd-3.7 $(TOOLS_DIR)/etcdctl

# Tests wait for etcd most of the time: more of them at once than there are cores.
TEST_THREADS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores > 6 ? cores : 6)))

# Of what tests try at random they try a quarter, or all of it with EFFORT=full.
.PHONY: test
test: tools goclient linearizer rust-present ## Run the tests on real etcd 3.7, and what concerns versions on 3.6 and 3.5; option: EFFORT=full
	@$(timed) 'compile rangecache and its tests' $(CARGO) test --locked --workspace --no-run
	@RUST_TEST_THREADS="$${RUST_TEST_THREADS:-$(TEST_THREADS)}" $(timed) 'run the tests' $(CARGO) test --locked --workspace

.PHONY: linearize
linearize: tools linearizer rust-present ## Check linearizability under faults; options: SCENARIO=no-quorum,mix SECONDS=300 SEED=7
	LINEAR_SCENARIO='$(SCENARIO)' LINEAR_SECONDS='$(SECONDS)' LINEAR_SEED='$(SEED)' \
	  $(CARGO) test --locked --test linearizability -- --ignored --nocapture scenarios

.PHONY: simulate
simulate: rust-present ## Simulate rangecache with a model of etcd; options: JOB=mixed, restores or hubs, SEEDS=10000 FIRST_SEED=0, or SEED=1234 with its trace
	JOB='$(JOB)' SEEDS='$(SEEDS)' FIRST_SEED='$(FIRST_SEED)' SEED='$(SEED)' \
	  $(CARGO) test --locked --profile simulate --test simulation -- --ignored --exact --nocapture chosen_seeds

.PHONY: simulate-planted
simulate-planted: rust-present ## Count the seeds until a simulation finds each bug of tests/planted; options: PLANTED=03 SEEDS=1000
	CARGO='$(CARGO)' SIMULATED_SEEDS='$(or $(SEEDS),1000)' tests/planted/run $(PLANTED)

.PHONY: planted
planted: tools linearizer rust-present ## Plant each bug of tests/planted and check that a test catches it; PLANTED=03 selects
	CARGO='$(CARGO)' tests/planted/run $(PLANTED)

.PHONY: reference
reference: rust-present ## Write the tables of docs/reference/ (flags, metrics, findings) again from the declarations in the source
	UPDATE_REFERENCE=1 $(CARGO) test --quiet --locked --test end_to_end reference_pages_are_generated

mutant_switch := --manifest-path tests/mutant-switch/Cargo.toml

# What a release and the benchmarks compile; only our own packages are compiled once more for it.
own_packages = rangecache tour $(shell sed -n 's/^name = "\(.*\)"/\1/p' crates/*/Cargo.toml)
as_released = --bench suite --bench micro --bench abuse $(foreach package,$(own_packages),--config profile.dev.package.$(package).debug-assertions=false)

.PHONY: check
check: rust-present ## Check phrases, words of the documents, formatting, lints, and sources of dependencies
	@$(timed) 'refused phrases' .ci/phrases
	@$(timed) 'words of the documents' .ci/words
	@$(timed) 'formatting' $(CARGO) fmt --all --check
	@$(timed) 'dependencies: sources and bans' .ci/dependencies
	@$(timed) 'lints' $(CARGO) clippy --locked --workspace --all-targets -- -D warnings

.PHONY: check-as-released
check-as-released: rust-present ## Check the lints of what a release and the benchmarks compile
	@$(timed) 'lints without debug assertions' $(CARGO) clippy --locked --workspace --lib --bins $(as_released) -- -D warnings

.PHONY: check-mutant-switch
check-mutant-switch: rust-present ## Check and test the tool of make mutants and make planted
	@$(timed) 'mutant-switch: formatting' $(CARGO) fmt $(mutant_switch) --check
	@$(timed) 'mutant-switch: lints' $(CARGO) clippy --locked $(mutant_switch) --target-dir target/mutant-switch --all-targets -- -D warnings
	@$(timed) 'mutant-switch: tests' $(CARGO) test --quiet --locked $(mutant_switch) --target-dir target/mutant-switch

cargo_deny := $(TOOLS_DIR)/cargo/bin/cargo-deny

.PHONY: licences
licences: $(cargo_deny) ## Check the licences of dependencies, and again their sources and bans
	$(CARGO) fetch --locked --quiet
	@$(timed) 'dependencies: bans, licences and sources' $(cargo_deny) --offline --locked check bans licenses sources

# A debug build, which takes less time.
$(cargo_deny):
	$(CARGO) install cargo-deny --version '^0.20' --locked --debug --root $(TOOLS_DIR)/cargo

.PHONY: nightly
nightly: ## Run all that .ci/run leaves out: other checks, servers and suites, long runs, benchmarks; takes hours
	@.ci/nightly

.PHONY: bench
bench: $(TOOLS_DIR)/etcd-3.7 rust-present ## Measure against etcd and its grpc-proxy; options: CASES=P1,P5 ROUNDS=7 WATCHERS=1000 BASELINE=./old-rangecache
	$(CARGO) bench --locked --bench suite -- $(if $(CASES),CASES=$(CASES)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(BASELINE),--baseline $(abspath $(BASELINE))) $(BENCH_ARGS)

.PHONY: bench-etcd
bench-etcd: $(addprefix $(TOOLS_DIR)/,etcd-3.7 etcdctl benchmark) rust-present ## Run etcd's own benchmark tool against etcd, its grpc-proxy and rangecache; option: ROUNDS=5
	$(CARGO) build --locked --release
	$(if $(ROUNDS),ROUNDS='$(ROUNDS)') benches/etcd-benchmark

.PHONY: watch-soak
watch-soak: $(TOOLS_DIR)/etcd-3.7 rust-present ## Check that every watcher gets every event while everything fails; options: MINUTES=10 WATCHERS=10000
	$(CARGO) bench --locked --bench suite -- watch-soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(WATCHERS),--watchers $(WATCHERS))

.PHONY: abuse
abuse: $(TOOLS_DIR)/etcd-3.7 rust-present ## Misbehave in every known way next to an honest client; options: SECONDS=10 BEHAVIOURS=ping-flood
	SECONDS='$(SECONDS)' BEHAVIOURS='$(BEHAVIOURS)' $(CARGO) bench --locked --bench abuse -- $(ABUSE_ARGS)

# cargo-fuzz needs options of the compiler that are not stable, which RUSTC_BOOTSTRAP permits; no sanitizer, because the
# library has no unsafe code.
FUZZ_TARGETS = $(or $(TARGET),$(sort $(basename $(notdir $(wildcard fuzz/targets/*.rs)))))
FUZZ_OPTIONS := --fuzz-dir fuzz --target-dir target/fuzz --sanitizer none
cargo_fuzz = env RUSTC_BOOTSTRAP=1 $(TOOLS_DIR)/cargo/bin/cargo-fuzz

.PHONY: fuzz
fuzz: $(TOOLS_DIR)/cargo/bin/cargo-fuzz rust-present ## Fuzz by coverage, each target in turn; options: TARGET=tree FUZZ_SECONDS=600
	@$(timed) 'build the fuzz targets' $(cargo_fuzz) build $(FUZZ_OPTIONS)
	@for target in $(FUZZ_TARGETS); do \
	  mkdir -p target/fuzz/corpus/$$target; \
	  $(timed) "fuzz $$target" $(cargo_fuzz) run $(FUZZ_OPTIONS) $$target target/fuzz/corpus/$$target fuzz/corpus/$$target -- \
	    -max_total_time=$(or $(FUZZ_SECONDS),600) -max_len=2048 -timeout=20 -print_final_stats=1 -verbosity=1; \
	done

# Edges alone: without counters one input for each of them is kept.
.PHONY: fuzz-corpus
fuzz-corpus: $(TOOLS_DIR)/cargo/bin/cargo-fuzz rust-present ## Add what `make fuzz` has found to the committed corpora, and minimize them; TARGET=tree selects
	@for target in $(FUZZ_TARGETS); do \
	  cp -n target/fuzz/corpus/$$target/* fuzz/corpus/$$target/; \
	  $(cargo_fuzz) cmin $(FUZZ_OPTIONS) $$target fuzz/corpus/$$target -- -use_counters=0 -set_cover_merge=1 -max_len=2048; \
	done

$(TOOLS_DIR)/cargo/bin/cargo-fuzz:
	$(CARGO) install cargo-fuzz --version '^0.13' --locked --root $(TOOLS_DIR)/cargo

# A shard is a random sample: tests/mutant-switch/README.md has results of some.
.PHONY: mutants
mutants: $(TOOLS_DIR)/cargo/bin/cargo-mutants tools goclient rust-present ## Change the source in one place at a time, and list what no test notices; options: SHARD=0/66 MUTANTS=20 SEEDS=500
	@MUTANTS='$(MUTANTS)' SEEDS='$(SEEDS)' $(timed) 'mutants' .ci/mutants $(SHARD)

.PHONY: check-mutants
check-mutants: $(TOOLS_DIR)/cargo/bin/cargo-mutants tools goclient rust-present ## The same for the lines that have changed; options: BASE=origin/main MUTANTS=60
	@MUTANTS='$(MUTANTS)' SEEDS='$(SEEDS)' $(timed) 'mutants of changed lines' .ci/mutants --since \
	  "$$(git merge-base HEAD '$(or $(BASE),origin/main)')"

$(TOOLS_DIR)/cargo/bin/cargo-mutants:
	$(CARGO) install cargo-mutants --version '=27.1.0' --locked --root $(TOOLS_DIR)/cargo

# Not part of `make test`: other servers than those that are supported, and tests on 3.6 and 3.5 that `make test` runs on 3.7 alone.
.PHONY: test-other-etcds
test-other-etcds: $(addprefix $(TOOLS_DIR)/,$(OTHER_ETCDS)) tools goclient rust-present ## Test on etcd 3.8, 3.5.12 (too old) and Kine, and on 3.6 and 3.5 what make test leaves out
	$(CARGO) test --locked --test end_to_end -- --ignored

# Not part of `make test`: Helm and promtool take minutes to build the first time.
HELMS ?= helm-4 helm-3
.PHONY: chart-test
chart-test: chart-tools $(addprefix $(TOOLS_DIR)/,etcd-3.7 etcdctl) rust-present ## Test the Helm chart, its alerts and its dashboard; option: HELMS=helm-4
	$(CARGO) build --locked $(BINARIES)
	cd tests/chart && HELMS='$(HELMS)' $(GO) test -count=1 ./...

.PHONY: chart-tools
chart-tools: $(addprefix $(TOOLS_DIR)/,$(HELMS) promtool)
	@cd tests/chart && $(GO) test -run '^$$' ./... >/dev/null

.PHONY: chart-reference
chart-reference: rust-present go-present ## Write the list of values in charts/rangecache/README.md again from values.yaml and its schema, and the list of flags
	$(CARGO) build --locked $(BINARIES)
	cd tests/chart && UPDATE_REFERENCE=1 $(GO) test -count=1 -run 'TestValuesTableIsGenerated|TestFlagsAreThoseOfTheProgram' ./...

# Not part of `make test`: a node's programs take ten minutes to build the first time, and the test needs root.
.PHONY: test-node
test-node: $(addprefix $(TOOLS_DIR)/,kube-node pause helm-4 etcd-3.7 node-packages/unpacked) rust-present ## Take the chart's static pod through its life on a true Kubernetes node, in namespaces; needs root and a Debian or Ubuntu
	$(CARGO) build --locked $(BINARIES)
	cd tests/node && $(GO) test -count=1 -v -timeout 45m ./...

# Not part of `make test`: kube-apiserver takes minutes to build the first time.
.PHONY: test-kube
test-kube: $(addprefix $(TOOLS_DIR)/,kube-apiserver helm-4 etcd-3.7 etcd-3.6) rust-present ## Compare two real kube-apiservers on rangecache with the same on etcd, and test the chart on one
	$(CARGO) build --locked $(BINARIES)
	cd tests/kube && $(GO) test -count=1 -timeout 20m ./...

# Not part of `make test`: etcd's framework takes minutes to build the first time.
.PHONY: test-etcd
test-etcd: $(TOOLS_DIR)/etcd-3.7 rust-present go-present ## Run etcd's own tests of watches, and its robustness traffic and validation, through rangecache
	$(CARGO) build --locked $(BINARIES)
	cd tests/etcd && $(GO) test -count=1 -timeout 10m -v ./...

# Not part of `make test`: Kubernetes' packages take minutes to build the first time.
.PHONY: test-kubestorage
test-kubestorage: rust-present go-present ## Run Kubernetes' own tests of its storage with rangecache between their clients and etcd
	$(CARGO) build --locked $(BINARIES)
	cd tests/kubestorage && $(GO) test -count=1 -timeout 20m -v ./...

# Not part of `make test`: downloads the clients.
.PHONY: test-clients
test-clients: $(addprefix $(TOOLS_DIR)/,etcd-3.7 client-coredns client-cilium client-patroni/installed) rust-present ## Run real clients of etcd (CoreDNS, Cilium, Patroni) directly and through rangecache, and compare what they see
	$(CARGO) build --locked $(BINARIES)
	cd tests/clients && $(GO) test -count=1 -v ./...

.PHONY: bench-kube
bench-kube: $(addprefix $(TOOLS_DIR)/,kube-apiserver etcd-3.7) rust-present ## Measure what two real kube-apiservers cost etcd: directly, through grpc-proxy, through rangecache
	$(CARGO) build --release --locked --bin rangecache
	cd tests/kube && RANGECACHE='$(CURDIR)/target/release/rangecache' KUBE_OBJECTS=20000 KUBE_SECONDS=15 KUBE_GRPC_PROXY=1 \
	  $(GO) test -count=1 -timeout 20m -run TestTable -v ./...

.PHONY: bench-keps
bench-keps: $(addprefix $(TOOLS_DIR)/,kube-apiserver etcd-3.7) rust-present ## Run KEP-2340's benchmark and KEP-4988's reads with and without rangecache; options: KUBE_OBJECTS=5000 KUBE_LARGE_OBJECTS=30 KUBE_SECONDS=3
	$(CARGO) build --release --locked --bin rangecache
	cd tests/kube && RANGECACHE='$(CURDIR)/target/release/rangecache' KUBE_KEPS=1 KUBE_OBJECTS=$(or $(KUBE_OBJECTS),300000) \
	  KUBE_LARGE_OBJECTS=$(or $(KUBE_LARGE_OBJECTS),300) KUBE_SECONDS=$(or $(KUBE_SECONDS),60) \
	  $(GO) test -count=1 -timeout 60m -run TestKEPs -v ./...

.PHONY: bench-modern
bench-modern: $(addprefix $(TOOLS_DIR)/,kube-apiserver etcd-3.7 etcd-3.6) rust-present ## Measure three default kube-apiservers with no rangecache, a sidecar each, one shared, leaves behind a hub; options: KUBE_OBJECTS=2000 KUBE_SECONDS=5
	$(CARGO) build --release --locked --bin rangecache
	cd tests/kube && RANGECACHE='$(CURDIR)/target/release/rangecache' KUBE_MODERN=1 KUBE_OBJECTS=$(or $(KUBE_OBJECTS),200000) \
	  KUBE_SECONDS=$(or $(KUBE_SECONDS),600) $(GO) test -count=1 -timeout 180m -run TestModern -v ./...

.PHONY: bench-behind
bench-behind: $(addprefix $(TOOLS_DIR)/,kube-apiserver etcd-3.7) rust-present ## Measure --when-behind=forward and fail while rangecache restarts under 1,000 clients, and under a kube-apiserver
	$(CARGO) build --release --locked --bin rangecache
	cd tests/kube && RANGECACHE='$(CURDIR)/target/release/rangecache' KUBE_BEHIND=1 \
	  $(GO) test -count=1 -timeout 20m -run TestBehind -v ./...

.PHONY: bench-packing
bench-packing: $(addprefix $(TOOLS_DIR)/,kube-apiserver etcd-3.7) rust-present ## Measure how much memory objects of a kube-apiserver take, plain and packed; option: KUBE_OBJECTS=2000
	$(CARGO) build --release --locked --bin rangecache
	cd tests/kube && RANGECACHE='$(CURDIR)/target/release/rangecache' KUBE_PACKING=1 KUBE_OBJECTS=$(or $(KUBE_OBJECTS),2000) \
	  $(GO) test -count=1 -timeout 20m -run TestPacking -v ./...

# Lists the crates that the binary is built from. C code (jemalloc, aws-lc) is listed under its crate; glibc and Rust's
# standard library belong to the toolchain and are not listed.
.PHONY: sbom
sbom: $(TOOLS_DIR)/cargo/bin/cargo-cyclonedx ## Write the bill of materials, for scanners: target/rangecache.cdx.json (CycloneDX)
	@export SOURCE_DATE_EPOCH="$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || date +%s)}"; \
	PATH="$(CURDIR)/$(TOOLS_DIR)/cargo/bin:$$PATH" $(CARGO) cyclonedx --quiet --format json --spec-version 1.5 \
	  --describe binaries --no-build-deps --target $(SBOM_TARGET)
	@mkdir -p target
	@# Strip the build path.
	@sed 's|path+file://$(CURDIR)/[^"#]*/\([^"#/]*\)#\([0-9]\)|pkg:cargo/\1@\2|g; s|path+file://$(CURDIR)[^"#]*#|pkg:cargo/|g' rangecache_bin.cdx.json > target/rangecache.cdx.json
	@rm -f rangecache_bin.cdx.json testkit/*.cdx.json tour/*.cdx.json
	@echo 'target/rangecache.cdx.json'

$(TOOLS_DIR)/cargo/bin/cargo-cyclonedx: | rust-present
	$(CARGO) install cargo-cyclonedx --version '^0.5.9' --locked --debug --root $(TOOLS_DIR)/cargo

# `make test` runs these tests too, and skips those that need a browser if none is installed.
.PHONY: page-test
page-test: $(addprefix $(TOOLS_DIR)/,etcd-3.7 etcd-3.6 etcd-3.5) rust-present ## Test the status page in headless Chromium; screenshots in target/page
	@test -n "$(PAGE_BROWSER)" || for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v "$$name" >/dev/null && exit 0; \
	done || { echo 'Chromium is needed: install it, or name it by PAGE_BROWSER=' >&2; exit 1; }
	$(if $(PAGE_BROWSER),PAGE_BROWSER='$(PAGE_BROWSER)') $(CARGO) test --locked --test end_to_end operate::page:: -- --nocapture

.PHONY: page-picture
page-picture: $(TOOLS_DIR)/etcd-3.7 $(TOOLS_DIR)/etcdctl rust-present ## Write docs/page.png: the status page after a quarter of an hour of load, by Chromium
	$(CARGO) build --locked --release
	demo/picture

.PHONY: recording
recording: ## Write docs/run.svg: what make run prints, each line at its time
	demo/record

$(TOOLS_DIR)/cargo/bin/mdbook:
	$(CARGO) install mdbook --version '^0.5' --locked --root $(TOOLS_DIR)/cargo

.PHONY: book
book: $(TOOLS_DIR)/cargo/bin/mdbook ## Write the documents as a book into target/book (mdBook)
	packaging/book

# --- releases ---------------------------------------------------------------------------------------------------------

# The first architecture must be this machine's, and is the only one of a BINARY without %. For another one: apt-get install
# gcc-aarch64-linux-gnu libc6-dev-arm64-cross
DIST_ARCHES ?= $(if $(or $(findstring %,$(BINARY)),$(if $(BINARY),,all)),amd64 arm64,$(shell packaging/arch))

.PHONY: pgo-profile
pgo-profile: $(TOOLS_DIR)/etcd-3.7 rust-present ## Build rangecache so that it counts, send it a mix of calls, and write target/pgo/rangecache.profdata
	@CARGO='$(CARGO)' packaging/pgo-profile target/pgo

.PHONY: pgo
pgo: pgo-profile ## Build a release by its profile (PGO): target/pgo/rangecache
	@$(timed) 'build by the profile' env CARGO_TARGET_DIR=target/pgo/built PGO_PROFILE=target/pgo/rangecache.profdata CARGO='$(CARGO)' \
	  packaging/build-static "$$(packaging/arch)" target/pgo

.PHONY: dist
dist: rust-present ## Build a release into target/dist: static binaries, archives, .deb, formula, bills of materials, checksums; option: BINARY=target/pgo/rangecache
	@CARGO='$(CARGO)' BINARY='$(BINARY)' packaging/dist target/dist $(DIST_ARCHES)

.PHONY: image
image: ## Build the image of binaries that are built already, by Docker: BINARY=target/pgo/rangecache; options: IMAGE_TAG=… IMAGE_ARGS=--push
	@BINARY='$(BINARY)' IMAGE_ARGS='$(IMAGE_ARGS)' packaging/image '$(or $(IMAGE_TAG),rangecache)' $(DIST_ARCHES)

.PHONY: release-check
release-check: $(TOOLS_DIR)/helm-4 rust-present ## Make twice what a release consists of, compare, and list it with sizes and digests; option: BINARY=target/pgo/rangecache
	@CARGO='$(CARGO)' BINARY='$(BINARY)' packaging/release-check target/release-check $(DIST_ARCHES)

.PHONY: chart-package
chart-package: $(TOOLS_DIR)/helm-4 ## Package the chart with the image's digest into target/chart: IMAGE_DIGEST=sha256:...
	@packaging/chart target/chart '$(IMAGE_DIGEST)'

.PHONY: check-workflows
check-workflows: $(TOOLS_DIR)/actionlint ## Check the workflows of GitHub
	@$(timed) 'workflows' $(TOOLS_DIR)/actionlint -color=false
	@! grep -rnE 'uses: [^.]' .github | grep -vE '@[0-9a-f]{40} # v[0-9.]+$$' || { echo 'an action is named by its commit, with the version behind it' >&2; exit 1; }

.PHONY: check-packaging
check-packaging: ## Check the sandbox of the systemd unit
	@$(timed) 'the systemd unit' systemd-analyze security --offline=true --threshold=20 --no-pager packaging/rangecache.service

.PHONY: advisories
advisories: $(cargo_deny) ## Check the dependencies for known vulnerabilities; needs the network
	$(cargo_deny) --locked check advisories

.PHONY: version
version:
	@sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml | head -1

.PHONY: rust-present
rust-present:
	@command -v $(CARGO) >/dev/null || { echo 'Rust is needed: https://rustup.rs' >&2; exit 1; }

# --- tools: real etcd, its command-line clients and the Go test client ------------------------------------------------

# $(1): name of the tool; $(2): path of a binary to use instead, or empty.
# A link to a path that an earlier run was given is replaced when the path is no longer given.
define tool
ifneq ($(2),)
$(TOOLS_DIR)/$(1): FORCE
	@test -x '$(2)' || { echo '$(2), given for $(1), is not an executable file' >&2; exit 1; }
	@mkdir -p $(TOOLS_DIR)
	@if [ '$(2)' -ef $$@ ]; then :; else ln -sfn "$$$$(realpath '$(2)')" $$@; fi
	@echo 'using $(2) for $$@'
else
ifneq ($$(shell test -L $(TOOLS_DIR)/$(1) && echo link),)
$(TOOLS_DIR)/$(1): FORCE
endif
$(TOOLS_DIR)/$(1): $$(wildcard tests/tools/$(1)/*.go tests/tools/$(1)/go.mod tests/tools/$(1)/go.sum) | go-present
	@mkdir -p $(TOOLS_DIR)
	@cd tests/tools/$(1) && CGO_ENABLED=0 $$(CURDIR)/$(timed) 'build $$@ (a minute or two the first time)' $(GO) build -trimpath -buildvcs=false -ldflags='-s -w $(ldflags_$(1))' -o '$$(CURDIR)/$$@.new' $$(if $$(wildcard tests/tools/$(1)/main.go),.,$(tags_$(1)) tool)
	@mv -f $$@.new $$@
endif
endef

# A virtual environment of Python with Patroni, from the package registry.
$(TOOLS_DIR)/client-patroni/installed: tests/tools/client-patroni/requirements.txt
	@command -v python3 >/dev/null || { echo 'Python 3 with venv is needed for Patroni' >&2; exit 1; }
	@rm -rf $(@D)
	python3 -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# What a node has beside Kubernetes' own programs. Nothing is installed: the packages are unpacked into a folder.
NODE_PACKAGES := containerd runc containernetworking-plugins
$(TOOLS_DIR)/node-packages/unpacked:
	@command -v apt-get >/dev/null || { echo 'containerd and runc are taken from the packages of Debian or Ubuntu: apt-get is needed' >&2; exit 1; }
	@rm -rf $(@D) && mkdir -p $(@D)/archives
	cd $(@D)/archives && apt-get download $(NODE_PACKAGES)
	@for package in $(@D)/archives/*.deb; do dpkg-deb --extract $$package $(@D) || exit 1; done
	@rm -r $(@D)/archives
	@touch $@

.PHONY: FORCE
FORCE:

.PHONY: go-present
go-present:
	@command -v $(GO) >/dev/null || { \
	  echo 'Go is needed to build the real etcd that rangecache is tested with.' >&2; \
	  echo 'Install Go 1.26 or newer from https://go.dev/dl, or use binaries that you have:' >&2; \
	  echo '  make ... ETCD_3_7=/path/to/etcd ETCD_3_6=... ETCD_3_5=... ETCDCTL=/path/to/etcdctl' >&2; \
	  echo 'or try rangecache on a running etcd: make run ENDPOINTS=http://127.0.0.1:2379' >&2; \
	  exit 1; }

# Checking rules needs no service discovery; without it promtool is half the size.
tags_promtool := -tags=remove_all_sd
# Without a version at build time kube-apiserver reports v0.0.0 in /version.
ldflags_kube-apiserver := -X k8s.io/component-base/version.gitVersion=v1.37.2
ldflags_kube-node := $(ldflags_kube-apiserver) -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37
override_etcd-3.7 := $(ETCD_3_7)
override_etcd-3.6 := $(ETCD_3_6)
override_etcd-3.5 := $(ETCD_3_5)
override_etcdctl := $(ETCDCTL)
$(foreach name,$(ALL_TOOLS),$(eval $(call tool,$(name),$(override_$(name)))))

.PHONY: tools
tools: $(addprefix $(TOOLS_DIR)/,$(ETCD_TOOLS)) ## Build etcd 3.7, 3.6, 3.5 and etcdctl into target/tools

.PHONY: goclient
goclient: $(TOOLS_DIR)/goclient ## Build the Go client whose transcript the tests compare

.PHONY: linearizer
linearizer: $(TOOLS_DIR)/linearizer ## Build the linearizability checker, on porcupine

.PHONY: clean-tools
clean-tools: ## Remove target/tools
	rm -rf $(TOOLS_DIR)
