"""The measures of a decoder, from which its memory is told."""

from __future__ import annotations

from dataclasses import dataclass

from laurel.errors import ConfigError

UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with gated feed-forward layers."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    """All of them, with the head."""
    layer_parameters: int
    """Of one decoder layer, the largest."""
    normalises_heads: bool = False
    """Queries and keys have norms of their own, as in Qwen 3."""
    divides_vocabulary: bool = True
    """Its embedding and head are such as tensor-parallel ranks divide by vocabulary."""
    refuses_tensor_parallel: str | None = None
    """Why loading would not split its layers over any number of ranks; None: it would."""

    @property
    def other_parameters(self) -> int:
        """Those outside the decoder layers: embeddings and head."""
        return max(0, self.num_parameters - self.num_layers * self.layer_parameters)

    def undivided(self, tp: int) -> int:
        """Parameters that every tensor-parallel rank has whole: embeddings and head, or none."""
        divides = self.divides_vocabulary and self.vocab_size % tp == 0
        return 0 if divides else self.other_parameters

    def outside(self, tp: int) -> int:
        """Parameters outside the layers that a tensor-parallel rank computes with."""
        return self.undivided(tp) or self.other_parameters // tp

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear maps of a layer, by their usual names."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys),
            "o_proj": (queries, hidden), "gate_proj": (hidden, wide), "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }  # fmt: skip


def decoder_shape(
    *,
    hidden_size: int,
    num_layers: int,
    intermediate_size: int,
    num_heads: int,
    vocab_size: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_parameters: int | None = None,
    has_language_head: bool = True,
) -> ModelShape:
    """The shape of a Llama-like decoder; what is not said is computed.

    Args:
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        intermediate_size: Width of the feed-forward layers.
        num_heads: Attention heads.
        vocab_size: Entries of the embedding.
        num_kv_heads: Key and value heads; None: as many as attention heads.
        head_dim: Width of a head; None: the hidden size, divided.
        num_parameters: None: two norms a layer, no biases, embeddings and language head apart.
        has_language_head: False for a reward model, whose head is one row.
    """
    num_kv_heads = num_kv_heads or num_heads
    head_dim = head_dim or hidden_size // num_heads
    attention = 2 * hidden_size * head_dim * (num_heads + num_kv_heads)
    layer = attention + 3 * hidden_size * intermediate_size + 2 * hidden_size
    embeddings = vocab_size * hidden_size
    head = embeddings if has_language_head else hidden_size
    counted = num_layers * layer + embeddings + hidden_size + head
    return ModelShape(
        hidden_size=hidden_size, num_layers=num_layers, intermediate_size=intermediate_size,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, vocab_size=vocab_size,
        num_parameters=num_parameters or counted, layer_parameters=layer,
    )  # fmt: skip


def parse_shape(text: str, *, has_language_head: bool) -> ModelShape:
    """A shape as it is written on the command line: `hidden_size=8192,num_layers=80,...`.

    Raises:
        ConfigError: An unknown or missing measure, or no number.
    """
    required = ("hidden_size", "num_layers", "intermediate_size", "num_heads", "vocab_size")
    optional = ("num_kv_heads", "head_dim", "num_parameters")
    measures: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = part.partition("=")
        if key not in (*required, *optional):
            raise ConfigError(f"{part!r}: a shape has {', '.join((*required, *optional))}")
        measures[key] = parse_count(value)
    missing = [key for key in required if key not in measures]
    if missing:
        raise ConfigError(f"the shape {text!r} lacks {', '.join(missing)}")
    return decoder_shape(**measures, has_language_head=has_language_head)


def parse_count(text: str) -> int:
    """`70B`, `1.5M` or `8192` as a number.

    Raises:
        ConfigError: It is none, or not above 0.
    """
    number, unit = text.strip(), 1
    if number[-1:].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1:].upper()]
    count = _product(number, unit)
    if count <= 0:
        raise ConfigError(f"{text!r} is no number above 0, like 70B, 1.5M or 8192")
    return count


def parse_bytes(text: str) -> int:
    """`80GiB`, `141GB`, `512MiB` or a number of bytes.

    Raises:
        ConfigError: It is none, or not above 0.
    """
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
             "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
    for unit, size in units.items():
        if text.strip().lower().endswith(unit.lower()):
            return _bytes(text, text.strip()[: -len(unit)], size)
    return _bytes(text, text, 1)


def _bytes(text: str, number: str, unit: int) -> int:
    size = _product(number, unit)
    if size <= 0:
        raise ConfigError(f"{text!r} is no amount of memory, like 80GiB or 141GB")
    return size


def _product(number: str, unit: int) -> int:
    """0 where it is no number."""
    try:
        return round(float(number) * unit)
    except (ValueError, OverflowError):
        return 0
