# Sourced by .ci/mutants and tests/planted/run: a copy of the project that is changed, built and tested.
# Wants $root, the project's folder, and $folder, which gets the copy ($tree) and what cargo builds of it: two copies in one target
# directory would get equal file names, and test each other's binaries.
tree="$folder/tree" switch="$root/target/mutant-switch/debug/mutant-switch"
mkdir -p "$folder"
"${CARGO:-cargo}" build --quiet --locked --manifest-path "$root/tests/mutant-switch/Cargo.toml" --target-dir "$root/target/mutant-switch"
export CARGO_TARGET_DIR="$folder/target"
# The copy is no work tree of git's, though it lies in one.
export GIT_CEILING_DIRECTORIES="$folder"

# Copies again, so that the files are newer than any build of a changed one.
copy_tree() {
  rm -rf "$tree"
  mkdir -p "$tree/target"
  ln -s "$root/target/tools" "$tree/target/tools"
  (cd "$root" && git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T -) | tar -x -m -C "$tree"
}
