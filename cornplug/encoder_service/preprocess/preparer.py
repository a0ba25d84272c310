"""From a medium's bytes to a request of the encoder: decode, digest, preprocess, make the key."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug import identity
from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.models.registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.preprocess.audio import AudioPreprocessor
from cornplug.encoder_service.preprocess.image import ImagePreprocessor
from cornplug.encoder_service.preprocess.preprocessor import (
    IN_PROCESS,
    FrameSampling,
    MediaPreprocessor,
    MediumLimits,
    PreprocessContext,
    PreprocessorOutput,
)
from cornplug.encoder_service.preprocess.video import VideoPreprocessor
from cornplug.encoder_service.wire.messages import EncodeRequest
from cornplug.encoder_service.wire.tensors import to_wire
from cornplug.errors import EncoderRefused

APP: Final = "http"
"""App of the entries of media that come by HTTP."""
SGLANG: Final = "sglang"
"""App of the entries of SGLang's servers, by SGLang's protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessedMedium:
    request: EncodeRequest
    dtype: str
    """The embedding's dtype, by torch's name."""
    media_digest: bytes
    """The media digest."""


ENGINE_SAMPLING: Final = FrameSampling()
PREPROCESSORS: Final[Mapping[Modality, Callable[[LoadedModel, MediumLimits], MediaPreprocessor]]] = {
    "image": ImagePreprocessor,
    "video": VideoPreprocessor,
    "audio": AudioPreprocessor,
}


class MediaPreparer:
    """Thread-safe. Preprocessors are built when a model is loaded, and run no code of a checkpoint.

    Raises CheckpointError("bad_config") where a checkpoint has no processor that loads.
    """

    def __init__(self, registry: ModelRegistry, *, secret: bytes, limits: MediumLimits) -> None:
        self._registry = registry
        self._secret = secret
        self._limits = limits
        # By model identity, never by name: a reload may give a name another model.
        self._preprocessors: dict[bytes, MediaPreprocessor] = {}
        registry.on_load(self._add_preprocessors)

    def prepare(
        self,
        model: str,
        modality: Modality,
        data: bytes,
        *,
        salt: str | None,
        deadline_s: float,
        sampling: FrameSampling = ENGINE_SAMPLING,
        context: PreprocessContext = IN_PROCESS,
    ) -> PreprocessedMedium:
        """The request for the medium in `data`, as this model's engine would make it.

        `sampling` chooses the frames of a video; the key follows from the frames and their times. `context`
        decodes, and may refuse.

        Raises EncoderRefused("unknown_model", or "modality" that the model does not take), and MediaError as
        the modality's preprocessor.
        """
        loaded = self._loaded(model)
        if modality != "video" and sampling != ENGINE_SAMPLING:
            raise EncoderRefused(f"fps, num_frames: of a video, not of {modality}", reason="bad_input")
        output = self._preprocessor(loaded, modality).read(data, sampling, context)
        return self._prepared(loaded, modality, output, salt, deadline_s, APP)

    def prepare_frames(
        self,
        model: str,
        images: Sequence[bytes],
        *,
        salt: str | None,
        deadline_s: float,
        sampling: FrameSampling = ENGINE_SAMPLING,
        context: PreprocessContext = IN_PROCESS,
    ) -> PreprocessedMedium:
        """The request for a video given as its frames, `sampling.fps` of them a second (1). All frames are
        taken.

        Raises as `prepare`, and as `video.decode_frames`.
        """
        if sampling.num_frames is not None:
            raise EncoderRefused("num_frames: the frames are given; all are taken", reason="bad_input")
        loaded = self._loaded(model)
        preprocessor = self._preprocessor(loaded, "video")
        assert isinstance(preprocessor, VideoPreprocessor)
        output = preprocessor.read_images(images, sampling.fps or 1.0, context)
        return self._prepared(loaded, "video", output, salt, deadline_s, APP)

    def prepare_for_sglang(
        self,
        model: str,
        data: bytes,
        *,
        salt: str | None,
        deadline_s: float,
        context: PreprocessContext = IN_PROCESS,
    ) -> PreprocessedMedium:
        """`prepare` for an image, as an SGLang server of this model would make it."""
        loaded = self._loaded(model)
        preprocessor = self._preprocessor(loaded, "image")
        assert isinstance(preprocessor, ImagePreprocessor)
        return self._prepared(
            loaded, "image", preprocessor.read_for_sglang(data, context), salt, deadline_s, SGLANG
        )

    def _add_preprocessors(self, loaded: LoadedModel) -> None:
        for modality in loaded.checkpoint.family.inputs:
            model_identity = loaded.served.identity_for(modality)
            if modality in PREPROCESSORS and model_identity is not None:
                self._preprocessors[model_identity] = PREPROCESSORS[modality](loaded, self._limits)

    def _preprocessor(self, loaded: LoadedModel, modality: Modality) -> MediaPreprocessor:
        preprocessor = self._preprocessors.get(loaded.served.identity_for(modality) or b"")
        if preprocessor is None:
            taken = [m.name for m in loaded.served.modalities if m.identity in self._preprocessors]
            raise EncoderRefused(
                f"{modality}: {loaded.served.name} takes {', '.join(taken)} only", reason="modality"
            )
        return preprocessor

    def _prepared(
        self,
        loaded: LoadedModel,
        modality: Modality,
        output: PreprocessorOutput,
        salt: str | None,
        deadline_s: float,
        app: str,
    ) -> PreprocessedMedium:
        model_identity = loaded.served.identity_for(modality)
        assert model_identity is not None
        wanted = loaded.checkpoint.family.inputs[modality]
        request = EncodeRequest(
            id=0,
            identity=model_identity,
            key=identity.embedding_key(self._secret, model_identity, output.digest, salt),
            cache_salt=salt,
            inputs={name: to_wire(output.inputs[name]) for name in wanted if name in output.inputs},
            app=app,
            deadline_s=deadline_s,
        )
        return PreprocessedMedium(request=request, dtype=loaded.served.dtype, media_digest=output.digest)

    def _loaded(self, model: str) -> LoadedModel:
        loaded = self._registry.by_name(model)
        if loaded is None:
            raise unknown_model(model)
        return loaded


def unknown_model(model: str) -> EncoderRefused:
    """The refusal. It lists no other model: names are often folders, which are only for callers that may list
    models."""
    return EncoderRefused(
        f"model: {model[:200]!r} is not served; GET /v1/models lists what is", reason="unknown_model"
    )


def medium_bytes(field: str, text: str) -> bytes:
    """A medium out of a JSON text: base64, or a data URL with base64. Remote URLs are not fetched.

    Raises EncoderRefused("bad_input") or ("remote_url").
    """
    if text.startswith("data:"):
        header, _, text = text.partition(",")
        if not header.endswith(";base64"):
            raise EncoderRefused(f"{field}: a data URL must be base64", reason="bad_input")
    elif "://" in text[:32]:
        raise EncoderRefused(f"{field}: remote URLs are not fetched; send the bytes", reason="remote_url")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise EncoderRefused(f"{field}: not base64: {e}", reason="bad_input") from None
