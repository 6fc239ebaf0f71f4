"""Engine options for contents of prompts, such as images, and the memory that they take."""

from dataclasses import dataclass

from quire.option_fields import Bytes, Flag, Options, Switch, option

DEFAULT_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class ContentOptions(Options):
    """Whether and when the encoder of images is loaded, and how much of its results is kept."""

    language_model_only: bool = option(
        False,
        Switch(),
        group="model",
        help="serve a multimodal model for text: its encoder of images is not loaded",
        doc="serve a multimodal model for text only. Its encoder of images is not loaded, and"
        " prompts with images are refused.",
    )
    load_encoder_at_start: bool = option(
        False,
        Switch(),
        group="model",
        help="load the encoder of images when the engine starts, not for the first image",
        doc="load a multimodal model's encoder of images when the engine starts. By default it is"
        " loaded between steps when the first image comes, into memory that is reserved from the"
        " start. On a GPU, with a cache_dir, and in engines of a fleet it is always loaded at the"
        " start.",
    )
    encoder_cache_memory: int | str | None = option(
        None,
        Bytes(1 << 20, usual_unit="MiB"),
        group="memory",
        help="memory for the embeddings of images, such as 256MiB",
        doc='bytes for the embeddings of images, or text such as "256MiB": an image that is asked'
        " about again is not encoded again while its embeddings are kept. None: 256 MiB.",
        flag=Flag(shown="256MiB"),
    )

    @property
    def encoder_cache_bytes(self) -> int:
        """encoder_cache_memory in bytes, or its default."""
        assert not isinstance(self.encoder_cache_memory, str)
        return self.encoder_cache_memory or DEFAULT_CACHE_BYTES
