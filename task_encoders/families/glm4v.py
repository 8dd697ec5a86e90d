"""GLM-4.1V and 4.5V (`glm4v`), and GLM-4.6V (`glm46v`), which takes other frames of a video."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from task_encoders.families.base.family import Family, Preset, language_sizes
from task_encoders.families.glm_v import DEPTH, GlmEncoder, GlmOptions
from task_encoders.field_types import Count, Number


class Glm4vOptions(GlmOptions):
    """Options of GLM-4.1V and 4.5V."""

    #: frames taken per second of video
    video_fps: Annotated[Number, Field(gt=0)] = 2.0
    #: from a longer video as many frames are taken as from one of this many seconds
    video_max_seconds: Count = 300


class Glm4vEncoder(GlmEncoder):
    """Frames at a constant rate, and whole seconds."""

    LENGTHS_OF = "glm4v"

    options: Glm4vOptions

    def frame_numbers(self, total: int, fps: float) -> Sequence[int]:
        rate, longest = self.options.video_fps, self.options.video_max_seconds
        seconds = total / fps
        if seconds <= longest:
            times = [i * fps / rate for i in range(max(math.floor(seconds * rate), 1))]
        elif (wanted := int(longest * rate)) >= total:
            return range(total)
        else:
            times = [time * fps for time in np.linspace(0, seconds, wanted)]
        return [min(total - 1, math.ceil(time)) for time in times]

    def time_text(self, seconds: float) -> str:
        return str(int(seconds))


class Glm46vEncoder(GlmEncoder):
    """The rate follows the duration; tenths of seconds."""

    LENGTHS_OF = "glm46v"

    def frame_numbers(self, total: int, fps: float) -> Sequence[int]:
        seconds = total / fps
        shown = min(seconds, 2400)
        rate = DEPTH * (3 if shown <= 30 else 1 if shown <= 300 else 0.5)
        wanted = min(int(shown * rate), 640)
        frames: list[int] = []
        if total >= wanted:
            times, time = np.arange(total) * (1 / fps), 0.0
            number = 0
            while number < total:
                frames.append(number)
                time += 1 / rate
                if time >= int(seconds):
                    break
                number = max(number + 1, int(np.searchsorted(times, time)))
        if len(frames) < wanted:
            ends = (frames[0], frames[-1]) if frames else (0, total - 1)
            return np.linspace(*ends, wanted, dtype=int).tolist()
        if len(frames) > wanted:
            return np.linspace(0, total - 1, wanted, dtype=int).tolist()
        return frames

    def time_text(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


def _text(hidden: int, ffn: int, layers: int, heads: int, sections: list[int]) -> dict[str, Any]:
    """A text config; half of each head is rotated."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": sections}
    others = {"vocab_size": 151_552, "rms_norm_eps": 1e-5, "rope_parameters": rope}
    return language_sizes(hidden, ffn, layers, heads, 2, **others)


def _vision(hidden: int, ffn: int, depth: int, heads: int, out: int) -> dict[str, Any]:
    return {
        "model_type": "glm4v_vision",
        "depth": depth,
        "hidden_size": hidden,
        "hidden_act": "silu",
        "intermediate_size": ffn,  # of the merger
        "num_heads": heads,
        "out_hidden_size": out,
    }


#: "tiny" has the real vocabulary and trains on a CPU.
PRESETS: Final = {
    "tiny": Preset(
        _text(64, 128, 2, 4, [1, 1, 2]), _vision(32, 96, 2, 2, 64), {"tie_word_embeddings": True}
    ),
    "9b": Preset(
        _text(4096, 13_696, 40, 32, [8, 12, 12]),
        _vision(1536, 13_696, 24, 12, 4096),
        {"tie_word_embeddings": False},
    ),
}

GLM4V: Final = Family(
    "glm4v",
    Glm4vOptions,
    Glm4vEncoder,
    PRESETS["9b"].cost("GLM-4.1V-9B"),
    "Glm4v",
    processor="Glm4vProcessor",
    presets=PRESETS,
)
GLM46V: Final = Family(
    "glm46v",
    GlmOptions,
    Glm46vEncoder,
    PRESETS["9b"].cost("GLM-4.6V-Flash"),
    "Glm46V",
    other_names=("glm46v", "glm4v"),
    processor="Glm46VProcessor",
    presets=PRESETS,
)
