"""What training on a sample costs: floating-point operations of the model, forward pass."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer stack that decide its cost."""

    hidden_size: int
    num_layers: int
    #: width of the feed-forward layer
    ffn_size: int
    #: matrices of the feed-forward layer: 3 with a gate (SwiGLU), else 2
    ffn_matrices: int = 3
    #: width of keys and values together with grouped-query attention, as a share of hidden_size
    kv_share: float = 1.0
    #: causal attention computes half of the score matrix
    causal: bool = True

    def flops(self, num_tokens: np.ndarray) -> np.ndarray:
        """2 operations per multiplication; attention is quadratic within the sample only."""
        length = np.asarray(num_tokens, np.float64)
        projections = 2 * self.hidden_size**2 * (2 + 2 * self.kv_share)
        feed_forward = 2 * self.ffn_matrices * self.hidden_size * self.ffn_size
        scores = 4 * self.hidden_size * (0.5 if self.causal else 1.0)
        return self.num_layers * (length * (projections + feed_forward) + scores * length**2)


#: Qwen2-VL-7B: 28 layers, 28 heads, 4 key-value heads
QWEN2_VL_7B = TransformerShape(3584, 28, 18944, kv_share=4 / 28)
#: its vision tower; patches attend within one image, or one step in time of a video
QWEN2_VL_VISION = TransformerShape(1280, 32, 5120, ffn_matrices=2, causal=False)


def sample_cost(
    num_tokens: np.ndarray,
    num_vision_patches: np.ndarray | None = None,
    num_images: np.ndarray | None = None,
) -> np.ndarray:
    """Forward operations of each sample, float64 (num_samples,): language model plus vision tower.

    All arrays are (num_samples,). The patches of a sample count as ``num_images`` equal pictures
    (default: one), steps in time of videos included. The cost of a pack is the sum over its
    samples.
    """
    cost = QWEN2_VL_7B.flops(num_tokens)
    if num_vision_patches is not None:
        images = np.maximum(1, num_images) if num_images is not None else 1
        cost = cost + images * QWEN2_VL_VISION.flops(np.asarray(num_vision_patches) / images)
    return cost


def padded_tokens(counts: npt.NDArray[np.integer], batch_size: int) -> float:
    """Tokens of an epoch whose random batches are padded to the longest of their samples: the mean
    over all orders of the samples, in closed form.

    Args:
        counts: (longest + 1,) samples of each length; at least one sample.
    """
    num_batches, rest = divmod(int(counts.sum()), batch_size)
    total = num_batches * batch_size * _mean_longest(counts, batch_size)
    return total + (rest * _mean_longest(counts, rest) if rest else 0.0)


def _mean_longest(counts: npt.NDArray[np.integer], drawn: int) -> float:
    """Mean of the longest of some samples drawn without replacement; 0 where there are fewer."""
    up_to = np.cumsum(counts, dtype=np.int64)
    none_longer = np.ones(len(counts))
    for i in range(drawn):  # all of the drawn samples are among those up to this length
        none_longer *= np.maximum(up_to - i, 0) / max(up_to[-1] - i, 1)
    return float(np.diff(none_longer, prepend=0.0) @ np.arange(len(counts)))
