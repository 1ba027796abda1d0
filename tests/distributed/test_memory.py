"""What a rank holds at once falls with the number of ranks."""

from __future__ import annotations

from tests.distributed import measured
from tests.distributed.world import all_well, run

LENGTH = 4096


def test_the_memory_of_a_rank_falls_as_the_number_of_ranks_rises() -> None:
    found = all_well(run(measured.memory, 4, LENGTH))
    shard = LENGTH * measured.HEADS * measured.WIDTH * 4 // 4  # bytes of a rank's queries, of four ranks
    for rank in range(4):
        most = {key: found[rank].get(key, found[0][key]) for key in found[0]}
        assert most[4, "heads"] < 1.1 * most[1, "heads"] / 4
        assert most[2, "heads"] < 1.1 * most[1, "heads"] / 2
        # The ring holds shards of others beside its own: two on their way in, with gradients as many on their way back.
        assert most[4, "ring"] < 0.65 * most[2, "ring"]
        assert most[4, "ring"] < 0.5 * most[1, "ring"]
        assert most[4, "ring"] < 24 * shard  # whole keys and values alone would be 8, and their gradients 8 more
