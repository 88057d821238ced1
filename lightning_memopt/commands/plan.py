"""`memopt plan`: what a run will hold, before it starts."""

from __future__ import annotations

import json as json_format

from lightning_memopt.planning import plan as make_plan


def plan(
    config: str,
    memory: str | None = None,
    methods: str | None = None,
    world_size: int | None = None,
    json: bool = False,
) -> None:
    """Print the peak memory of a training step by kind, for the config itself and for other ways of training.

    Needs neither a GPU nor the model's weights.

    Args:
        config: YAML file as for `memopt fit`.
        memory: Of one device, like 80GiB; then each method is said to fit or not, and up to which batch.
        methods: Names joined by commas.
        world_size: Devices that shard the model; by default the config's, if its strategy shards.
        json: Print one JSON object instead of a table.
    """
    names = methods.split(",") if methods else None
    found = make_plan(config, memory=memory, methods=names, world_size=world_size)
    print(json_format.dumps(found.to_dict(), indent=1) if json else found)
