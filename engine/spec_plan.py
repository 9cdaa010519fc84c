"""What of speculation is decided, and refused, at start-up."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.layers.attention import AttentionMixer
from engine.layers.gdn import GdnMixer
from engine.models.hybrid import DecoderBlock, HybridModel
from engine.spec_protocol import DEFAULT_MAX_MATCH_LEN, DEFAULT_MIN_MATCH_LEN, SpecSettings

DEFAULT_NUM_DRAFTS = 3
NGRAM = "ngram"
# Options that mean something only with a draft method, and those only with NGRAM.
DEPENDENT_OPTIONS = (
    "speculative_num_steps",
    "speculative_draft_model_path",
    "synthetic_acceptance",
)
NGRAM_OPTIONS = (
    "speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size",
)


def choose_speculation(config: EngineConfig) -> SpecSettings | None:
    """What the options ask for; None without a draft method.

    Raises:
        ValueError: a value is out of range, or options do not go together; names them.
    """
    if config.speculative_algorithm is None:
        refuse_options(
            config,
            DEPENDENT_OPTIONS,
            "needs a draft method: add --speculative-algorithm, or leave it out",
        )
    if config.speculative_algorithm != NGRAM:
        refuse_options(
            config,
            NGRAM_OPTIONS,
            f"needs --speculative-algorithm {NGRAM}: add that, or leave it out",
        )
    if config.speculative_algorithm is None:
        return None
    if config.overlap == "on":
        raise ValueError(
            "--overlap on does not go together with --speculative-algorithm yet: drafts follow the "
            "tokens of the step before; use --overlap auto"
        )
    return SpecSettings(
        algorithm=config.speculative_algorithm,
        num_drafts=or_default(config.speculative_num_steps, DEFAULT_NUM_DRAFTS),
        draft_model_path=config.speculative_draft_model_path,
        synthetic_acceptance=config.synthetic_acceptance,
        min_match_len=or_default(
            config.speculative_ngram_min_match_window_size, DEFAULT_MIN_MATCH_LEN
        ),
        max_match_len=or_default(
            config.speculative_ngram_max_match_window_size, DEFAULT_MAX_MATCH_LEN
        ),
    )


def refuse_options(config: EngineConfig, options: tuple[str, ...], problem: str) -> None:
    """Raise ValueError with `problem` for the first of the options that was given."""
    for option in options:
        if getattr(config, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} {problem}")


def or_default(value: int | None, default: int) -> int:
    """What was given, or else the default."""
    return default if value is None else value


def check_verify_layers(model: HybridModel, num_drafts: int) -> None:
    """Refuse a target of which a layer cannot score a request's drafts in one step.

    Raises:
        ValueError: names the layer, and the flags that would help.
    """
    num_rows = num_drafts + 1
    for index, block in enumerate(model.blocks):
        assert isinstance(block, DecoderBlock)
        mixer = block.mixer
        assert isinstance(mixer, (GdnMixer, AttentionMixer))
        most = mixer.capabilities.max_rows_per_request
        if most < num_rows:
            remedy = (
                "leave --speculative-algorithm out"
                if most == 1
                else f"lower --speculative-num-steps to {most - 1}"
            )
            raise ValueError(
                f"--speculative-num-steps {num_drafts}: layer {index} ({type(mixer).__name__}) "
                f"takes {most} rows of a request in one step, not {num_rows}; {remedy}"
            )
