"""The identity of an engine whose weights were replaced, while it ran, by those of another folder.

The engine goes on with the settings that it started with, whatever the folder's config says. So the identity
is of those settings and the new weights: a fresh engine of that folder shares with it where its own settings
come out the same.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families.generic import PROCESSOR_FILES
from cornplug.checkpoints.hub_cache import read_json
from cornplug.engine_common import engine_state
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError


class StartedModel:
    """The model that this process's engine started with, described before any update.

    Later, the engine's settings may name the folder of the new weights.
    """

    def __init__(self) -> None:
        self._model: EngineModel | None = None

    @property
    def known(self) -> bool:
        """Whether this process has described it."""
        return self._model is not None

    def now(self, describe: Callable[[], EngineModel]) -> EngineModel:
        """The model with the weights of this epoch; `describe` describes that of the start.

        Raises CheckpointError: "weights_updated" where no folder is known to hold them, and as
        `with_weights_of` and `describe`.
        """
        state = engine_state.current()
        if state.epoch() == 0:
            model = describe()
            if state.epoch() == 0:
                # Read before the first update began. A process may start one engine after another.
                self._model = model
            return model
        source = state.source()
        if source is None or source.path is None:
            raise _unknown("the weights were replaced")
        return self.with_weights(source.path, source.began_ns)

    def with_weights(self, path: str, began_ns: int) -> EngineModel:
        """`with_weights_of` the model. Raises CheckpointError as that."""
        if self._model is None:
            raise _unknown("this process has not described the model that it started with")
        return with_weights_of(self._model, path, began_ns)


def with_weights_of(model: EngineModel, path: str, began_ns: int) -> EngineModel:
    """The same model, after a folder's weights were loaded over its own.

    `began_ns`: as `EngineModel.began_ns`, of that folder. Raises CheckpointError: "weights_updated" where the
    folder does not hold every tensor of the model, and no other, and as `Checkpoint.open`.
    """
    old = model.checkpoint
    if len(os.fsencode(path)) > engine_state.LONGEST_PATH_BYTES:
        raise _unknown("the path of the folder is too long")
    if not Path(path).is_dir():
        raise _unknown(f"the weights were replaced from {path!r}, which is no folder")
    found = Checkpoint.open(path)
    if old.base or found.base:
        raise _unknown("a part of this model lies in another checkpoint")
    new = dataclasses.replace(found, config=old.config, preprocessors=old.preprocessors)
    if old.tensor_layout() != new.tensor_layout():
        # Tensors that one of them lacks stay as they were: then no folder holds what runs.
        raise _unknown(f"the tensors of {path} are not those of {old.path}")
    # The identity reads these from the folder, and the engine has read the other's.
    read = PROCESSOR_FILES if str(old.config.get("model_type")) in model.generic_inputs else ()
    for name in (*read, "generation_config.json"):
        if _settings(old, name) != _settings(new, name):
            raise _unknown(f"{path} and {old.path} differ in {name}")
    return dataclasses.replace(model, checkpoint=new, began_ns=began_ns)


def _settings(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    found = read_json(checkpoint.path / name) or {}
    return {field: value for field, value in found.items() if field != "transformers_version"}


def _unknown(why: str) -> CheckpointError:
    return CheckpointError(f"{why}. Restart the engine to share.", reason="weights_updated")
