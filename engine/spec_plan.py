"""What of speculation is decided, and refused, at start-up."""

from __future__ import annotations

from engine.attention.protocol import MAX_VERIFY_ROWS
from engine.config import EngineConfig
from engine.layers.attention import AttentionMixer
from engine.layers.gdn import GdnMixer
from engine.models.hybrid import DecoderBlock, HybridModel
from engine.request import is_integer
from engine.spec_protocol import SpecSettings

DEFAULT_NUM_DRAFTS = 3
MAX_NUM_DRAFTS = MAX_VERIFY_ROWS - 1
# Options that mean something only with a draft method.
DEPENDENT_OPTIONS = (
    "speculative_num_steps",
    "speculative_draft_model_path",
    "synthetic_acceptance",
)


def choose_speculation(config: EngineConfig) -> SpecSettings | None:
    """What the options ask for; None without a draft method.

    Raises:
        ValueError: options that go together with no draft method, or with no other; names them.
    """
    if config.speculative_algorithm is None:
        for option in DEPENDENT_OPTIONS:
            if getattr(config, option) is not None:
                flag = "--" + option.replace("_", "-")
                raise ValueError(
                    f"{flag} needs a draft method: add --speculative-algorithm, or leave it out"
                )
        return None
    if not isinstance(config.speculative_algorithm, str) or not config.speculative_algorithm:
        raise ValueError(
            f"--speculative-algorithm must be the name of a draft method, got "
            f"{config.speculative_algorithm!r}"
        )
    num_drafts = config.speculative_num_steps
    if num_drafts is None:
        num_drafts = DEFAULT_NUM_DRAFTS
    if not is_integer(num_drafts) or not 1 <= num_drafts <= MAX_NUM_DRAFTS:
        raise ValueError(
            f"--speculative-num-steps must be in [1, {MAX_NUM_DRAFTS}], got {num_drafts!r}"
        )
    if config.overlap == "on":
        raise ValueError(
            "--overlap on does not go together with --speculative-algorithm yet: drafts follow the "
            "tokens of the step before; use --overlap auto"
        )
    length = config.synthetic_acceptance
    is_length = isinstance(length, (int, float))
    if length is not None and not (is_length and 1.0 <= length <= num_drafts + 1):
        raise ValueError(
            f"--synthetic-acceptance must be in [1, {num_drafts + 1}] with "
            f"--speculative-num-steps {num_drafts}, got {length!r}"
        )
    return SpecSettings(
        algorithm=config.speculative_algorithm,
        num_drafts=num_drafts,
        draft_model_path=config.speculative_draft_model_path,
        synthetic_acceptance=length,
    )


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
