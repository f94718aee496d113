"""Estimates the memory that the roles of a plan use on each device, from their models' shapes.

No model is loaded. `docs/parallelism.md` gives each formula with the number that it yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from laurel.config.policy import Precision, RoleName
from laurel.errors import ConfigError
from laurel.planning.plan import AdapterRequest, ClusterRequest, Mesh, Plan, TrainingRequest

# The measures of a decoder, from which its memory is estimated.

GIB = 2**30
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder with gated feed-forward layers."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    """Number of all parameters, those of the head included."""
    layer_parameters: int
    """Number of parameters of the largest decoder layer."""
    normalises_heads: bool = False
    """Whether queries and keys have norms of their own, as in Qwen 3."""
    divides_vocabulary: bool = True
    """Whether tensor-parallel ranks split the embedding and the head by vocabulary."""
    refuses_tensor_parallel: str | None = None
    """Why the model's layers cannot be split over tensor-parallel ranks; None if they can."""

    @property
    def other_parameters(self) -> int:
        """The number of parameters outside the decoder layers: of the embeddings and the head."""
        return max(0, self.num_parameters - self.num_layers * self.layer_parameters)

    def undivided(self, tp: int) -> int:
        """Return how many parameters every one of `tp` tensor-parallel ranks holds whole.

        They are those of embeddings and head; 0 if the ranks split these by vocabulary.
        """
        divides = self.divides_vocabulary and self.vocab_size % tp == 0
        return 0 if divides else self.other_parameters

    def outside(self, tp: int) -> int:
        """Return how many parameters outside the decoder layers each of `tp` ranks holds."""
        return self.undivided(tp) or self.other_parameters // tp

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """The numbers of inputs and outputs of each linear map of a layer, by its usual name."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (queries, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }


def decoder_shape(
    *,
    hidden_size: int,
    num_layers: int,
    intermediate_size: int,
    num_heads: int,
    vocab_size: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    has_language_head: bool = True,
) -> ModelShape:
    """Return the shape of a Llama-like decoder; compute the sizes that are not given.

    Args:
        num_kv_heads: Number of key and value heads; None: as many as attention heads.
        head_dim: Width of a head; None: `hidden_size` divided by `num_heads`.
        has_language_head: False for a reward model, whose head is one row.

    Its parameters are counted with two norms a layer, no biases, and an embedding that is not tied
    to the language head.
    """
    num_kv_heads = num_kv_heads or num_heads
    head_dim = head_dim or hidden_size // num_heads
    attention = 2 * hidden_size * head_dim * (num_heads + num_kv_heads)
    layer = attention + 3 * hidden_size * intermediate_size + 2 * hidden_size
    embeddings = vocab_size * hidden_size
    head = embeddings if has_language_head else hidden_size
    counted = num_layers * layer + embeddings + hidden_size + head
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=num_layers,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        num_parameters=counted,
        layer_parameters=layer,
    )


def parse_shape(text: str, *, has_language_head: bool) -> ModelShape:
    """Parse a shape from the command line, such as `hidden_size=8192,num_layers=80,...`.

    Args:
        text: Sizes as `key=value`, separated by commas; the keys are `num_parameters` and
            arguments of `decoder_shape`.
        has_language_head: False for a reward model, whose head is one row.

    Raises:
        ConfigError: A key is unknown or missing, or a value is not a number above 0.
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
    num_parameters = measures.pop("num_parameters", None)
    shape = decoder_shape(**measures, has_language_head=has_language_head)
    return shape if num_parameters is None else replace(shape, num_parameters=num_parameters)


def parse_count(text: str) -> int:
    """Parse a number such as `70B`, `1.5M` or `8192`.

    Raises:
        ConfigError: The text is not a number above 0.
    """
    number, unit = text.strip(), 1
    if number[-1:].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1:].upper()]
    count = _product(number, unit)
    if count <= 0:
        raise ConfigError(f"{text!r} is no number above 0, like 70B, 1.5M or 8192")
    return count


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: `80GiB`, `141GB`, `512MiB` or a number of bytes.

    Raises:
        ConfigError: The text is not an amount of memory above 0.
    """
    units = {
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": GIB,
        "TiB": 2**40,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
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
    """Return the number times the unit; 0 if the text is not a number."""
    try:
        return round(float(number) * unit)
    except (ValueError, OverflowError):
        return 0


MIB = 2**20
RUNTIME_BYTES = 1536 * MIB
"""Bytes of a GPU's memory for the CUDA context, the libraries' workspaces and NCCL's buffers."""
MASTER_BYTES = 4
"""Bytes of each trained weight, its gradient and each of its optimizer states: all are float32."""
CHUNK_LOGITS: Mapping[Literal["cpu", "cuda"], int] = {"cpu": 2**24, "cuda": 2**28}
"""The most logits of one chunk of the language head, by kind of device.

They are 64 MiB on a CPU. On a GPU they are 1 GiB: each chunk reads the weights of the head three
times and adds to their gradient once, so that small chunks move more bytes than all layers do.
"""
LOGITS_BYTES = 3 * 4
"""Bytes for each logit that is in memory: the logit, its exponential and its gradient, in
float32."""
SERVED = ("served model", "its keys and values")
"""The kinds of bytes that a served model takes while it is awake."""
COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """The memory in use during one phase of a step, on each device of one role's slots."""

    name: str
    """Name of the phase: `training`, `generation` or `judging`."""
    slots_of: RoleName
    """The role that owns the devices (slots)."""
    parts: Mapping[str, int]
    """Bytes in use on one device, by kind: `weights`, `gradients`, `activations`, ..."""
    fraction: float = 1.0
    """Fraction of each device that belongs to the role that owns the slots."""

    @property
    def total(self) -> int:
        """The bytes in use on one device, over all kinds."""
        return sum(self.parts.values())

    def fits(self, device_memory: int) -> bool:
        """Return whether the phase fits into the role's fraction of a device of this many bytes."""
        return self.total <= device_memory * self.fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes of a run's models; an unknown model is left out of all estimates."""

    policy: ModelShape | None = None
    reward_models: tuple[ModelShape, ...] = ()
    """Shapes of the loaded reward models, in order; empty if any of them is unknown."""
    served: ModelShape | None = None
    """That of the model that the run serves for a function."""
    teacher: ModelShape | None = None
    """That of the model from which the policy learns besides."""


def estimate(
    request: ClusterRequest, plan: Plan, shapes: Shapes, *, device_memory: int | None = None
) -> tuple[MemoryPhase, ...]:
    """Estimate the device memory of each phase of a training step.

    There are phases for every role with slots of its own and a known shape. Roles that share slots
    take turns: their phases are alternatives, and the largest one counts. What one role keeps in
    memory during the phase of another is part of that phase.

    Args:
        device_memory: Bytes of a device, of which vLLM fills a fraction; None: not known.
    """
    phases = [
        *_on_policy(request, plan, shapes, device_memory),
        *_on_own_slots(request, plan, shapes, device_memory),
    ]
    runtime = {} if request.device == "cpu" else {"runtime": RUNTIME_BYTES}
    fractions = {role.name: role.fraction for role in plan.roles}
    return tuple(
        replace(phase, parts={**phase.parts, **runtime}, fraction=fractions[phase.slots_of])
        for phase in phases
    )


def larger_micro_batch(
    request: ClusterRequest, plan: Plan, shapes: Shapes, *, device_memory: int
) -> tuple[Plan, MemoryPhase] | None:
    """Return the plan with the policy's largest micro-batches that fit, and its training memory.

    Their tokens are doubled as long as a tenth of the device stays free. Each micro-batch rounds
    all weights and adds up all gradients, so that fewer and larger ones take less time.

    Args:
        device_memory: The bytes of a device.

    Returns:
        None if no larger ones fit, or if they would make no fewer passes.
    """
    found: tuple[Plan, MemoryPhase] | None = None
    batch = plan.batch("policy")
    while batch.num_micro_batches > 1:
        batch = replace(batch, tokens=2 * batch.tokens)
        batches = tuple(
            batch if one.role == "policy" and not one.is_validation else one for one in plan.batches
        )
        larger = replace(plan, batches=batches)
        phases = estimate(request, larger, shapes, device_memory=device_memory)
        training = next((phase for phase in phases if phase.name == "training"), None)
        if training is None or not training.fits(int(0.9 * device_memory)):
            break
        found = larger, training
    return found


def _on_policy(
    request: ClusterRequest, plan: Plan, shapes: Shapes, device_memory: int | None
) -> Iterator[MemoryPhase]:
    """Yield the phases on the policy's slots: its own, and those of roles that share the slots."""
    role, shape, drawing = plan.role("policy"), shapes.policy, request.drawing
    if role is None or shape is None:
        return
    batch = plan.batch("policy")
    own = training_memory(
        request.training,
        shape,
        role.mesh,
        tokens=batch.tokens,
        path_tokens=batch.path_tokens,
        device="cpu" if request.device == "cpu" else "cuda",
    )
    if shapes.teacher is not None:
        own["teacher"] = MASTER_BYTES * shapes.teacher.num_parameters // role.mesh.size
    scorer = _scoring(request, plan, shapes, shares_with="policy")
    served = _serving(request, plan, shapes, device_memory, shares_with="policy")
    awake, asleep = {**served, **_runtime(request, served)}, _runtime(request, served)
    guest = {"reward model": scorer["weights"]} if scorer else {}
    sleeps = request.served is not None and request.served.sleeps
    guest |= asleep if sleeps else awake
    yield MemoryPhase(name="training", slots_of="policy", parts={**own, **guest})
    stays = {
        n: size for n, size in own.items() if n in ("weights", "optimizer", "reference", "teacher")
    }
    taken = _drawing(request, plan, shapes, device_memory, shares_with="policy")
    if drawing is not None and taken:
        copy = {"engine's weights": taken.pop("weights")}
        if drawing.has_own_weights:
            # Optimizer and reference go to the host meanwhile; the weights stay to be handed over.
            stays_now = {n: size for n, size in stays.items() if n == "weights"} | copy
        else:  # the engine samples from the policy's own weights, unless it runs ahead of them
            stays_now = stays | (copy if drawing.runs_ahead else {})
        parts = {**stays_now, **taken, **guest}
        yield MemoryPhase(name="generation", slots_of="policy", parts=parts)
    if scorer:
        activations = {"reward model's activations": scorer["activations"]}
        yield MemoryPhase(
            name="judging", slots_of="policy", parts={**stays, **guest, **activations}
        )
    if served and sleeps:
        if taken and drawing is not None and drawing.has_own_weights:  # the learner rests as well
            stays = {n: size for n, size in stays.items() if n == "weights"}
        yield MemoryPhase(name="judging", slots_of="policy", parts={**stays, **awake})


def _on_own_slots(
    request: ClusterRequest, plan: Plan, shapes: Shapes, device_memory: int | None
) -> Iterator[MemoryPhase]:
    scorer = _scoring(request, plan, shapes, shares_with="generation")
    served = _serving(request, plan, shapes, device_memory, shares_with="generation")
    guest = {"reward model": scorer["weights"]} if scorer else {}
    guest |= {**served, **_runtime(request, served)}
    if taken := _drawing(request, plan, shapes, device_memory, shares_with=None):
        yield MemoryPhase(name="generation", slots_of="generation", parts={**taken, **guest})
        if scorer:
            activations = {"reward model's activations": scorer["activations"]}
            parts = {**taken, **guest, **activations}
            yield MemoryPhase(name="judging", slots_of="generation", parts=parts)
    if taken := _scoring(request, plan, shapes, shares_with=None):
        yield MemoryPhase(name="judging", slots_of="reward_model", parts=taken)
    if served := _serving(request, plan, shapes, device_memory, shares_with=None):
        yield MemoryPhase(name="judging", slots_of="reward_model", parts=served)


def training_memory(
    training: TrainingRequest,
    shape: ModelShape,
    mesh: Mesh,
    *,
    tokens: int,
    path_tokens: int = 0,
    device: Literal["cpu", "cuda"] = "cuda",
) -> dict[str, int]:
    """Return the bytes that training takes on one rank, by kind (`weights`, `gradients`, ...).

    Args:
        mesh: Arrangement of the ranks. All of them divide weights, gradients and optimizer states.
            If tp does not divide the vocabulary, embeddings and head are divided by the other axes
            only.
        tokens: Tokens of a micro-batch, before context parallelism divides them.
        path_tokens: Tokens above those of a part, whose keys and values are held.
        device: Kind of device, on which the number of logits in memory depends.
    """
    width = COMPUTE_BYTES[training.precision]
    adapters = adapter_parameters(training.adapters, shape)
    trained = shape.num_parameters if adapters is None else adapters
    held = shape.num_parameters + (adapters or 0)
    # What every tensor-parallel rank has whole counts once for each of them.
    again = shape.undivided(mesh.tp) * (mesh.tp - 1)
    held += again
    trained_here = trained + again if adapters is None else trained
    parts: dict[str, int] = {}
    # Otherwise the shares are on the host, and only what is being computed is `gathered` here.
    if not training.offloads:
        parts["weights"] = MASTER_BYTES * held // mesh.size
        parts["gradients"] = MASTER_BYTES * trained_here // mesh.size
        states = training.optimizer_states
        parts["optimizer"] = MASTER_BYTES * states * trained_here // mesh.size
        # With adapters, the policy without them is the reference.
        if training.keeps_reference and adapters is None:
            parts["reference"] = MASTER_BYTES * held // mesh.size
    parts["gathered"] = gathered_bytes(shape, mesh, trained=trained, compute_bytes=width)
    parts["activations"] = activation_bytes(
        shape,
        tokens=-(-tokens // mesh.cp),
        tp=mesh.tp,
        compute_bytes=width,
        recomputes=training.recomputes,
        sequence_parallel=training.sequence_parallel,
    )
    if path_tokens:
        # They are held with their gradients in float32, and every layer joins them with its own
        # for its backward pass.
        # Ranks of a context have all tokens of some heads, as those of tensor parallelism.
        heads = replace(mesh, tp=mesh.tp * mesh.cp)
        each = key_value_bytes(shape, heads, compute_bytes=1) * path_tokens
        joined = each // (shape.num_layers if training.recomputes else 1)
        parts["path"] = (width + MASTER_BYTES) * each + width * joined
    if mesh.cp > 1:
        # Each rank gathers the last hidden states of all ranks, and has their gradient.
        parts["whole row"] = 2 * MASTER_BYTES * tokens * shape.hidden_size
    if training.has_logits:
        entries = shape.vocab_size // (1 if shape.undivided(mesh.tp) else mesh.tp)
        # Chunks of a smaller micro-batch may be longer than those of a full one, but never this.
        chunk = min(tokens, max(1, CHUNK_LOGITS[device] // entries))
        parts["logits"] = LOGITS_BYTES * chunk * entries
    return parts


def scoring_memory(
    precision: Precision, shape: ModelShape, mesh: Mesh, *, tokens: int
) -> dict[str, int]:
    """Return the bytes on one rank of a reward model that only scores, by kind.

    Each replica holds the model once. If a replica has several ranks, the weights outside the
    layers stay gathered beside their shards.

    Args:
        tokens: Most tokens of a forward pass.
    """
    width = COMPUTE_BYTES[precision]
    again = shape.undivided(mesh.tp) * (mesh.tp - 1)
    weights = width * (shape.num_parameters + again) // mesh.group_size
    if mesh.group_size > 1:
        weights += width * shape.outside(mesh.tp)
    return {
        "weights": weights,
        "activations": _layer_bytes(
            shape,
            tokens=-(-tokens // mesh.cp),
            tp=mesh.tp,
            compute_bytes=width,
            sequence_parallel=False,
        ),
    }


def _scoring(
    request: ClusterRequest, plan: Plan, shapes: Shapes, *, shares_with: RoleName | None
) -> dict[str, int]:
    """Return the bytes of all reward models on one such slot, by kind; empty if there is none."""
    role = plan.role("reward_model")
    if role is None or not shapes.reward_models or role.shares_with != shares_with:
        return {}
    tokens = plan.batch("reward_model").tokens
    found = [
        scoring_memory(scorer.precision, shape, role.mesh, tokens=tokens)
        for scorer, shape in zip(request.reward_models, shapes.reward_models, strict=True)
    ]
    return {name: sum(parts[name] for parts in found) for name in found[0]}


def _serving(
    request: ClusterRequest,
    plan: Plan,
    shapes: Shapes,
    device_memory: int | None,
    *,
    shares_with: RoleName | None,
) -> dict[str, int]:
    """Return the bytes that servers take on one such slot while they are awake, by kind.

    They fill their share of the device; of one whose size is unknown, only the weights count.
    """
    role, served, shape = plan.role("reward_model"), request.served, shapes.served
    if role is None or served is None or role.shares_with != shares_with:
        return {}
    weights = 0 if shape is None else COMPUTE_BYTES[served.precision] * shape.num_parameters
    weights //= role.mesh.group_size
    pool = int(served.memory_share * (device_memory or 0))
    each = dict(zip(SERVED, (weights, max(0, pool - weights)), strict=True))
    number = -(-served.replicas // role.mesh.dp)
    return {name: number * size for name, size in each.items() if size}


def _runtime(request: ClusterRequest, served: Mapping[str, int]) -> dict[str, int]:
    """Return what servers beside another role keep of a GPU, asleep or awake."""
    if not served or request.device == "cpu":
        return {}
    return {"served model's runtime": RUNTIME_BYTES}


def _drawing(
    request: ClusterRequest,
    plan: Plan,
    shapes: Shapes,
    device_memory: int | None,
    *,
    shares_with: RoleName | None,
) -> dict[str, int]:
    """Return the bytes of one rank that generates on such slots, by kind; empty if none does.

    vLLM fills its share of the device with keys and values, however few are needed.
    """
    role, shape, drawing = plan.role("generation"), shapes.policy, request.drawing
    if role is None or shape is None or drawing is None or role.shares_with != shares_with:
        return {}
    width = COMPUTE_BYTES[drawing.precision]
    each = key_value_bytes(shape, role.mesh, compute_bytes=width)
    weights = (width if drawing.has_own_weights else MASTER_BYTES) * shape.num_parameters
    weights //= role.mesh.group_size
    rounded = (
        0 if drawing.has_own_weights or width == MASTER_BYTES else width * shape.num_parameters
    )
    batch = plan.batch("generation")
    needed = batch.tokens * each
    if drawing.has_static_slots:
        rows = -(-batch.tokens // batch.longest)
        needed = power_of_two(rows) * power_of_two(batch.longest) * each
    if drawing.has_own_weights and device_memory is not None:
        pool = int(drawing.memory_share * device_memory)
        needed = max(drawing.longest * each, pool - weights)
    parts = {"weights": weights, "keys and values": needed}
    if rounded:
        parts["rounded weights"] = rounded // role.mesh.group_size
    if drawing.conversation_bytes:
        parts["keys and values between turns"] = drawing.conversation_bytes
    return parts


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least the number."""
    return 1 << max(0, number - 1).bit_length()


def adapter_parameters(adapters: AdapterRequest, shape: ModelShape) -> int | None:
    """Count the weights of the low-rank adapters of a model; None if it trains without adapters."""
    if not adapters.enabled:
        return None
    chosen = (adapters.layers or set(shape.linear_layers)) - adapters.exclude
    sizes = [size for name, size in shape.linear_layers.items() if name in chosen]
    return shape.num_layers * sum(adapters.dim * (rows + columns) for rows, columns in sizes)


def gathered_bytes(shape: ModelShape, mesh: Mesh, *, trained: int, compute_bytes: int) -> int:
    """Return the bytes per rank of gathered (unsharded) weights and of their gradients.

    Several ranks keep embeddings and head gathered in float32 during the whole step, with their
    gradients and the sums of these. They gather two layers (the current and the next one) in the
    compute dtype, and hold the gradients of one layer in that dtype and, for the sum over ranks, in
    float32. Tensor-parallel ranks hold their shares of all this; gradients count where every weight
    is trained. A single rank holds the copy that autocast makes of float32 weights, and none where
    it computes in float32.

    Args:
        trained: Number of weights that are trained: all of the model's, or those of its adapters.
    """
    width = compute_bytes
    if mesh.size == 1:
        return 0 if width == MASTER_BYTES else width * trained
    learns = trained == shape.num_parameters
    outside = shape.outside(mesh.tp) * MASTER_BYTES * (3 if learns else 1)
    layers = shape.layer_parameters * (3 * width + MASTER_BYTES if learns else 2 * width)
    return outside + layers // mesh.tp


def activation_bytes(
    shape: ModelShape,
    *,
    tokens: int,
    tp: int,
    compute_bytes: int,
    recomputes: bool,
    sequence_parallel: bool,
) -> int:
    """Return the bytes of activations that a rank keeps for the backward pass.

    With recomputation, it keeps the input of each layer, and all activations of one layer.
    The last layer counts like the others, although it keeps less of tokens that nobody reads.

    Args:
        tokens: Number of tokens of a micro-batch on this rank.
        sequence_parallel: Whether tensor-parallel ranks divide the tokens between the layers.
    """
    layer = _layer_bytes(
        shape,
        tokens=tokens,
        tp=tp,
        compute_bytes=compute_bytes,
        sequence_parallel=sequence_parallel,
    )
    if not recomputes:
        return shape.num_layers * layer
    inputs = shape.num_layers * tokens * shape.hidden_size * compute_bytes
    return layer + inputs // (tp if sequence_parallel else 1)


def _layer_bytes(
    shape: ModelShape,
    *,
    tokens: int,
    tp: int,
    compute_bytes: int,
    sequence_parallel: bool,
) -> int:
    """Return the bytes of activations that one layer keeps on a rank.

    The count follows the tensors that transformers' Llama and Qwen 3 save. Two norms: the float32
    input, the normalised input and the result. Attention: queries, keys, values, its result and a
    float32 log-sum-exp for each head. Feed-forward: gate, up, activated gate and their product.
    With sequence parallelism, every rank still multiplies the results of the norms for all tokens.
    """
    width = compute_bytes
    norms, results = 2 * (4 + width) * shape.hidden_size, 2 * width * shape.hidden_size
    heads = shape.num_heads + shape.num_kv_heads
    split = 2 * width * heads * shape.head_dim + 4 * width * shape.intermediate_size
    split += 4 * shape.num_heads
    if shape.normalises_heads:
        split += (4 + width) * heads * shape.head_dim
    return tokens * (results + norms // (tp if sequence_parallel else 1) + split // tp)


def key_value_bytes(shape: ModelShape, mesh: Mesh, *, compute_bytes: int) -> int:
    """Return the bytes of one token's keys and values on each rank.

    Pipeline ranks divide the layers and tensor-parallel ranks the heads; each rank has at least one
    head.

    Args:
        compute_bytes: Bytes of a number in the cache.
    """
    heads = max(1, -(-shape.num_kv_heads // mesh.tp))
    layers = -(-shape.num_layers // mesh.pp)
    return 2 * layers * heads * shape.head_dim * compute_bytes
