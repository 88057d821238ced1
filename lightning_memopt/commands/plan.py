"""`memopt plan`: what a run will hold, before it starts."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping

from lightning_memopt.planning import plan as make_plan
from lightning_memopt.run_config import RunConfig


def plan(
    config: str,
    memory: str | None = None,
    methods: str | None = None,
    world_size: int | None = None,
    json: bool = False,
    overrides: Mapping[str, str] | None = None,
) -> None:
    """Print the peak memory of a training step by kind, for the config itself and for other ways of training.

    Needs neither a GPU nor the model's weights. Values of the config can be changed as for `memopt fit`:
    --model.init_args.NAME VALUE, --trainer.precision bf16-true.

    Args:
        config: YAML file as for `memopt fit`.
        memory: Of one device, like 80GiB; then each method is said to fit or not, and up to which batch.
        methods: Names joined by commas.
        world_size: Devices that shard the model; by default the config's, if its strategy shards.
        json: Print one JSON object instead of a table.
        overrides: Values by dotted name, which replace those of the config.
    """
    names = methods.split(",") if methods else None
    found = make_plan(RunConfig.read(config, overrides), memory=memory, methods=names, world_size=world_size)
    print(json_format.dumps(found.to_dict(), indent=1) if json else found)
