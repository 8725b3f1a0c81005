# For the benchmarks, to be sourced, with `bin` set.

# serve LOG ARGUMENTS...: starts `weft serve` in the background, what it says in LOG, and waits until it is ready:
# `server` is its process then, `address` where it listens. The script ends if it does not start.
serve() {
  local log=$1
  "$bin/weft" serve "${@:2}" --host=127.0.0.1 --port=0 --metrics-port=-1 2>"$log" &
  server=$!
  until grep -q "is ready on" "$log"; do
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; exit 1; }
    sleep 0.2
  done
  address=$(sed -n 's/.*listening on \([^ ]*\).*/\1/p' "$log" | head -n 1)
}
