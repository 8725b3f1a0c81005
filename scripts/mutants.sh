#!/usr/bin/env bash
# Puts known bugs into a copy of HEAD, one at a time, and requires that a test fails for each.
#
#   scripts/mutants.sh [NAME...]   all of scripts/mutants/*.patch, or those named
#
# A patch's line "tests: A B" names the test targets that are built and run. The script fails for a
# mutant that survives, does not apply or does not build, and when a test fails without any mutant.
# The copy and its build folder are kept in build/mutants: the second run is quick.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/mutants
jobs=${WEFT_JOBS:-$(nproc)}
limit_seconds=120 # of one test; a mutant that hangs counts as caught

patches=()
for name in "$@"; do patches+=("scripts/mutants/${name%.patch}.patch"); done
[ $# -gt 0 ] || patches=(scripts/mutants/*.patch)
for patch in "${patches[@]}"; do
  [ -f "$patch" ] || { echo "scripts/mutants.sh: there is no $patch" >&2; exit 2; }
done

tests_of() { sed -n 's/^tests: //p' "$1"; }

# Makes the copy equal to HEAD; files that are equal keep their time.
restore() {
  (cd "$root/head" && find . -type f -print0) | while IFS= read -r -d '' file; do
    cmp -s "$root/head/$file" "$root/tree/$file" && continue
    mkdir -p "$root/tree/$(dirname "$file")"
    cp "$root/head/$file" "$root/tree/$file"
  done
}

# build_tests LOG TEST...
build_tests() {
  cmake --build "$root/build" -j "$jobs" --target "${@:2}" >"$1" 2>&1
}

# failing_tests LOG TEST...: prints those of the tests that fail.
failing_tests() {
  local log=$1 test
  for test in "${@:2}"; do
    (cd "$root/build" && ctest --no-tests=error --timeout "$limit_seconds" -R "^$test\$") \
      >>"$log" 2>&1 || printf ' %s' "$test"
  done
}

rm -rf "$root/head"
mkdir -p "$root/head" "$root/tree" "$root/logs"
git archive HEAD | tar -x -C "$root/head"
[ ! -d ../shared ] || ln -sfn "$(cd ../shared && pwd)" "$root/shared" # goldens, beside the copy as beside us
echo "scripts/mutants.sh: building without a mutant"
restore
(cd "$root/tree" && cmake --preset release -B "$root/build" -DWEFT_BENCHMARKS=OFF \
  "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG") \
  >"$root/logs/configure.log"
mapfile -t all_tests < <(for patch in "${patches[@]}"; do tests_of "$patch"; done | tr ' ' '\n' | sort -u)
log=$root/logs/none.log
build_tests "$log" "${all_tests[@]}" || { tail -30 "$log"; exit 1; }
broken=$(failing_tests "$log" "${all_tests[@]}")
[ -z "$broken" ] || { echo "fails without a mutant:$broken (see $log)" >&2; exit 1; }

failed=0
table=$(printf '%-28s %-14s %5s  %s' mutant result sec 'tests that fail')
for patch in "${patches[@]}"; do
  name=$(basename "$patch" .patch)
  log=$root/logs/$name.log
  read -ra tests <<<"$(tests_of "$patch")"
  start=$SECONDS caught='' result=survived
  if ! patch -d "$root/tree" -p1 --no-backup-if-mismatch -r - <"$patch" >"$log" 2>&1; then
    result='does not apply'
  elif ! build_tests "$log" "${tests[@]}"; then
    result='does not build'
  else
    caught=$(failing_tests "$log" "${tests[@]}")
    [ -z "$caught" ] || result=caught
  fi
  [ "$result" = caught ] || failed=1
  line=$(printf '%-28s %-14s %5d %s' "$name" "$result" $((SECONDS - start)) "$caught")
  echo "$line"
  table+=$'\n'$line
  restore
done
printf '\n%s\n' "$table"
exit $failed
