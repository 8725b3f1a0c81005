#!/usr/bin/env bash
# Builds the container image of the CPU backend, weft:TAG, and proves that it works.
#
#   scripts/image.sh [--compile] [--test] [TAG]     TAG defaults to 0.1.0
#
# --compile  compile inside the build, as an image for others should be; without it the programs of
#            build/bin are taken, which belong to Debian 12
# --test     then run it: as its user, with a read-only root, no capabilities, no network but its own,
#            under a memory limit; the demo model is served, and SIGTERM stops it
#
# Uses the Docker daemon there is. Without one root gets a daemon that lives as long as this script,
# with its data in build/docker. Where no image can be pulled the base is made by mmdebstrap.
# Exit code 3: there is no container engine here and none can be started.
set -euo pipefail
cd "$(dirname "$0")/.."

compile=0 test=0 tag=0.1.0
for argument in "$@"; do
  case "$argument" in
    --compile) compile=1 ;;
    --test) test=1 ;;
    -*) echo "scripts/image.sh: unknown flag '$argument'; there are --compile and --test" >&2; exit 2 ;;
    *) tag=$argument ;;
  esac
done
readonly image=weft:$tag base=debian:bookworm-slim
readonly max_mb_over_base=60 memory=1536m
# Debian's client: it has BuildKit.
docker=/usr/bin/docker
[ -x "$docker" ] || docker=docker
export DOCKER_BUILDKIT=1

fail() { echo "image: $*" >&2; exit 1; }
cannot() { echo "image: no container engine: $*" >&2; exit 3; }

daemon_pid= run_dir=
containers=()
clean_up() {
  local container
  for container in "${containers[@]}"; do "$docker" rm -f "$container" >/dev/null 2>&1 || true; done
  if [ -n "$daemon_pid" ]; then
    kill "$daemon_pid" 2>/dev/null || true
    wait "$daemon_pid" 2>/dev/null || true
    rm -rf "$run_dir"
  fi
}
trap clean_up EXIT

# A daemon that leaves the network of this host alone.
start_daemon() {
  if "$docker" version >/dev/null 2>&1; then return; fi
  [ "$EUID" = 0 ] || cannot "no daemon answers, and only root can start one"
  command -v dockerd >/dev/null || cannot "no daemon answers; apt-get install docker.io mmdebstrap"
  local dir=$PWD/build/docker
  mkdir -p "$dir"
  # Sockets have short names.
  run_dir=$(mktemp -d /tmp/weft-docker.XXXXXX)
  export DOCKER_HOST=unix://$run_dir/d.sock
  dockerd --iptables=false --bridge=none -H "$DOCKER_HOST" --data-root "$dir/data" --exec-root "$run_dir/exec" \
    -p "$run_dir/d.pid" >"$dir/log" 2>&1 &
  daemon_pid=$!
  local i
  for ((i = 0; i < 60; ++i)); do
    if "$docker" version >/dev/null 2>&1; then return; fi
    kill -0 "$daemon_pid" 2>/dev/null || { tail -5 "$dir/log" >&2; cannot "dockerd has ended; see $dir/log"; }
    sleep 0.5
  done
  cannot "dockerd does not answer; see $dir/log"
}

get_base() {
  if "$docker" image inspect "$base" >/dev/null 2>&1; then return; fi
  if "$docker" pull -q "$base" >/dev/null 2>&1; then return; fi
  command -v mmdebstrap >/dev/null || fail "$base cannot be pulled, and there is no mmdebstrap to make it"
  echo "image: making $base with mmdebstrap"
  local tar=build/docker/rootfs.tar
  [ -e "$tar" ] || { mmdebstrap -q --format=tar --variant=minbase --include=ca-certificates bookworm "$tar.new"; mv "$tar.new" "$tar"; }
  "$docker" import "$tar" "$base" >/dev/null
}

build() {
  local binaries=compiled program
  if [ "$compile" = 0 ]; then
    binaries=prebuilt
    mkdir -p build/stripped
    for program in weft weft-router weft-worker weft-plan; do strip -o "build/stripped/$program" "build/bin/$program"; done
  fi
  "$docker" build --network=host -q -t "$image" -f deploy/docker/Dockerfile --build-arg BINARIES="$binaries" \
    --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)" . >/dev/null
}

megabytes() { echo $(($("$docker" image inspect -f '{{.Size}}' "$1") / 1000000)); }
in_image() { "$docker" run --rm --network=none --entrypoint /bin/sh "$image" -c "$1"; }

check_image() {
  local over=$(($(megabytes "$image") - $(megabytes "$base")))
  echo "image: $image is $(megabytes "$image") MB, $over over $base"
  [ "$over" -le "$max_mb_over_base" ] || fail "$over MB over the base; $max_mb_over_base are allowed"
  [ "$(in_image 'id -u')" = 65532 ] || fail "runs as $(in_image 'id -u'), not as 65532"
  in_image '! command -v gcc g++ cc c++ clang ld as make cmake' || fail "there is a compiler inside"
  in_image 'for p in weft weft-router weft-worker weft-plan; do $p --version || $p --help; done' >/dev/null || fail "a program does not start"
}

# run NAME ARGUMENTS...: as a pod of the chart would.
run() {
  containers+=("$1")
  "$docker" run -d --name "$1" --read-only --cap-drop=ALL --security-opt=no-new-privileges --memory="$memory" \
    --memory-swap="$memory" -v "$PWD/models/smollm2-135m-instruct/:/models/smollm2:ro" "${@:2}" >/dev/null
}
state() { "$docker" inspect -f "{{.State.$2}}" "$1"; }
wait_for_log() {
  local i
  for ((i = 0; i < 120; ++i)); do
    if "$docker" logs "$1" 2>&1 | grep -q "$2"; then return; fi
    [ "$(state "$1" Running)" = true ] || break
    sleep 1
  done
  "$docker" logs "$1" >&2
  fail "$1 does not say '$2'"
}
stop() {
  "$docker" stop -t 45 "$1" >/dev/null
  [ "$(state "$1" ExitCode)" = 0 ] || fail "$1 exits with $(state "$1" ExitCode) after SIGTERM"
  [ "$(state "$1" OOMKilled)" = false ] || fail "$1 ran out of memory"
}

readonly question=(--prompt "Once upon a time" --max-tokens 16 --temperature 0 --format json)
text_of() { grep -o '"text":"[^"]*"' <<<"$1"; }

# `weft serve` in one container.
test_serve() {
  run weft-image-serve --network=none "$image" serve /models/smollm2 -tp 2 -dcp 2
  wait_for_log weft-image-serve "kv capacity"
  local answer expected i
  answer=$(text_of "$("$docker" exec weft-image-serve weft generate --address 127.0.0.1:50051 "${question[@]}" 2>/dev/null)")
  expected=$(text_of "$(build/bin/weft generate --model models/smollm2-135m-instruct "${question[@]}" 2>/dev/null)")
  [ -n "$answer" ] && [ "$answer" = "$expected" ] || fail "the image says $answer, build/bin $expected"
  for ((i = 0; i < 30; ++i)); do
    [ "$(state weft-image-serve Health.Status)" = healthy ] && break
    sleep 1
  done
  [ "$(state weft-image-serve Health.Status)" = healthy ] || fail "health is $(state weft-image-serve Health.Status)"
  # As much KV as is there: the memory limit has to be enough for all of it.
  "$docker" exec weft-image-serve weft bench --address 127.0.0.1:50051 --random-input-len 256 --random-output-len 16 \
    --num-prompts 24 --max-concurrency 24 >/dev/null || fail "weft bench in the container fails"
  "$docker" logs weft-image-serve 2>&1 | grep "restarting" && fail "the group was restarted under $memory"
  stop weft-image-serve
}

# The ranks of a group as containers of one pod, and a router: what the chart makes for several nodes.
test_pod() {
  local rank
  for rank in 0 1; do
    local pod=(--network=none --ipc=shareable)
    [ "$rank" = 0 ] || pod=(--network=container:weft-image-rank0 --ipc=container:weft-image-rank0)
    run "weft-image-rank$rank" "${pod[@]}" --entrypoint weft-worker "$image" --model=/models/smollm2 -tp 2 -dcp 2 \
      --rank="$rank" --local-ranks=2 --leader-address=127.0.0.1:50052
  done
  run weft-image-router --network=container:weft-image-rank0 --entrypoint weft-router "$image" --model=/models/smollm2 \
    --groups=127.0.0.1:50052
  wait_for_log weft-image-rank0 "kv capacity"
  "$docker" exec weft-image-router weft generate --address 127.0.0.1:50051 "${question[@]}" >/dev/null 2>&1 || fail "weft generate through the pod fails"
  stop weft-image-router
  # All at once, as kubelet does.
  "$docker" kill -s TERM weft-image-rank1 >/dev/null
  stop weft-image-rank0
  stop weft-image-rank1
}

start_daemon
mkdir -p build/docker
get_base
build
check_image
if [ "$test" = 1 ]; then
  scripts/fetch_model.sh
  test_serve
  test_pod
  echo "image: $image serves, keeps to $memory, and stops"
fi
