"""The short version of scripts/soak.sh chaos."""

import os
import random

import chaos


def test_streams_survive_random_deaths():
    seed = int(os.environ.get("WEFT_CHAOS_SEED", random.randrange(2**32)))
    assert chaos.run(seconds=30, num_streams=50, seed=seed) == []


def test_a_rolling_restart_fails_no_call():
    assert chaos.rolling_restart(num_streams=20) == []
