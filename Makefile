# rangecache: everything that is typed to build, try, test and measure it. `make help` lists it.
# Needs Rust, Go, make and a C compiler; nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One etcd build at a time: each of them uses every core by itself.
.NOTPARALLEL:

GO ?= go
CARGO ?= cargo
TOOLS_DIR := target/tools
ETCD_TOOLS := etcd-3.7 etcd-3.6 etcd-3.5 etcdctl

.PHONY: help
help: ## Show this text
	@echo 'rangecache: a transparent caching gRPC proxy in front of etcd'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'ETCD_3_7, ETCD_3_6, ETCD_3_5 and ETCDCTL may each name a binary to use instead of building one.'

# --- tools: real etcd, its etcdctl and our Go client --------------------------------------------------------------

# $(1): name of the tool, also its folder under tests/tools; $(2): path given by the user, or empty.
# A link left by an earlier run with a path must give way once the path is no longer given.
define tool
ifneq ($(2),)
$(TOOLS_DIR)/$(1): FORCE
	@test -x '$(2)' || { echo "$(2), given for $(1), is not an executable file" >&2; exit 1; }
	@mkdir -p $(TOOLS_DIR) && ln -sfn "$$$$(realpath '$(2)')" $$@
	@echo 'using   $(2) as $$@'
else
ifneq ($$(shell test -L $(TOOLS_DIR)/$(1) && echo link),)
$(TOOLS_DIR)/$(1): FORCE
endif
$(TOOLS_DIR)/$(1): $$(wildcard tests/tools/$(1)/*.go tests/tools/$(1)/go.mod tests/tools/$(1)/go.sum) | go-present
	@echo 'building $$@ (a minute or so the first time)'
	@mkdir -p $(TOOLS_DIR)
	cd tests/tools/$(1) && CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags='-s -w' -o $$(CURDIR)/$$@.new .
	@mv -f $$@.new $$@
endif
endef

.PHONY: FORCE
FORCE:

.PHONY: go-present
go-present:
	@command -v $(GO) >/dev/null || { \
	  echo 'Go is needed to build the real etcd that rangecache is tested against.' >&2; \
	  echo 'Install Go 1.26 or newer (https://go.dev/dl), or name binaries that you have:' >&2; \
	  echo '  ETCD_3_7=/path/to/etcd ETCD_3_6=... ETCD_3_5=... ETCDCTL=/path/to/etcdctl make ...' >&2; \
	  exit 1; }

$(eval $(call tool,etcd-3.7,$(ETCD_3_7)))
$(eval $(call tool,etcd-3.6,$(ETCD_3_6)))
$(eval $(call tool,etcd-3.5,$(ETCD_3_5)))
$(eval $(call tool,etcdctl,$(ETCDCTL)))
$(eval $(call tool,goclient,))

.PHONY: tools
tools: $(addprefix $(TOOLS_DIR)/,$(ETCD_TOOLS)) ## Build etcd 3.7, 3.6, 3.5 and etcdctl into target/tools

.PHONY: goclient
goclient: $(TOOLS_DIR)/goclient ## Build the Go client that runs the conformance tour

.PHONY: clean-tools
clean-tools: ## Remove target/tools
	rm -rf $(TOOLS_DIR)
