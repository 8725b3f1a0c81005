"""The short version of scripts/soak.sh flat."""

import flat


def test_memory_descriptors_and_threads_stay_flat():
    # Allocators still settle in so few requests: only a leak of many KiB a request shows here.
    assert flat.run(num_requests=500, num_chunks=5, growth={"MiB": 12.0}) == []
