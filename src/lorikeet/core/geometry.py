"""The sizes of a model that the memory and the adapter packer need, and the names of its linear modules."""

import re

import msgspec

from lorikeet.core.states import StateShape, aligned, place_states

LORA_MODULES = ("q", "k", "v", "o", "gate", "up", "down")
"""The seven linear modules of a layer of the own decoder, in packing order. Other bases have modules of their own."""


PRODUCTS: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The fused linear weights of a layer of the own decoder, and the modules of each, in row order."""


RECURRENCE_INPUTS = ("recurrence_q", "recurrence_k", "recurrence_v", "recurrence_z", "recurrence_b", "recurrence_a")
"""Modules of layers with a recurrence that share one product. A state space has no ``b``."""
RECURRENCE_OUT = "recurrence_o"
"""The module of the output of such layers."""
RECURRENCE_VECTOR = "layers.{{}}.linear_attn.{}.weight"
"""The path of a weight of such layers that adapters may replace, in ``ReplaceableWeights.vectors``."""

ROW_PARALLEL = frozenset({"o", "down", RECURRENCE_OUT})
"""Modules that tensor parallelism splits by input, so that outputs are partial sums; others are split by output."""


SCORE = "score"
"""The score head of a classification adapter: a matrix ``[labels, hidden]``.

It is packed like a module of the last layer, behind all others, whose rank is the number of labels. It is no part of
``ModelGeometry.modules``. Nor is it an extra (``core.adapter``): extras change what the model computes, and are refused
by presets that merge adapters; a score head reads hidden states, and works there too."""


SCALE_BYTES = 4
"""Of the scale of a rank row of codes, in fp32."""

KV_SCALE_BYTES = 2
"""Of the scale of a key or value of codes, in bfloat16, which follows them."""


class ModuleShape(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of input and output features of one linear module."""

    in_features: int
    out_features: int


class KvShape(msgspec.Struct, frozen=True, array_like=True):
    """The KV of one token on a layer: ``heads`` keys of ``key_dim`` elements, and ``heads`` values of ``value_dim``."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Number of elements of the keys and values of one token."""
        return self.heads * (self.key_dim + self.value_dim)


class ModulePath(msgspec.Struct, frozen=True, array_like=True):
    """A linear layer with its name in checkpoints.

    Attributes:
        path: the name below the prefix. ``{}`` stands for the layer, as in ``layers.{}.self_attn.q_proj``.
        modules: the geometry's modules in the linear layer. A fused layer has several; the rows of its B are those of
            the first module, then of the second, and so on.
    """

    path: str
    modules: tuple[str, ...]


class ExpertsPath(msgspec.Struct, frozen=True, array_like=True):
    """The linear layers of all experts of a layer, whose weights are one parameter of three dimensions.

    In the name of one expert's module, ``*`` stands for the expert.

    Attributes:
        path: path of the parameter, as in ``layers.{}.mlp.experts.gate_up_proj``.
        experts: number of experts.
        modules: the geometry's modules in the linear layer of one expert, see ``ModulePath``.
        spellings: paths of each module in checkpoints with separate experts.
    """

    path: str
    experts: int
    modules: tuple[str, ...]
    spellings: tuple[tuple[str, ...], ...]

    def modules_of(self, expert: int) -> tuple[str, ...]:
        """Return the modules of one expert."""
        return tuple(module.replace("*", str(expert)) for module in self.modules)


class MatrixPath(msgspec.Struct, frozen=True, array_like=True):
    """A matrix that multiplies rows in a module that is not a linear layer, such as a router of experts.

    Attributes:
        path: path of the parameter, as in ``layers.{}.mlp.gate.weight``.
        module: the geometry's module of the product.
        spellings: paths of the module in checkpoints in which it is a linear layer.
    """

    path: str
    module: str
    spellings: tuple[str, ...]


class ModuleNames(msgspec.Struct, frozen=True):
    """The names that adapters may use for the modules of a base.

    Attributes:
        prefixes: accepted prefixes of the paths. The first is the base's own spelling.
        paths: the linear layers on which LoRA is supported. Two paths may stand for the same module. One path may stand
            for several modules on different layers.
        unused: beginnings of the names of modules that text requests do not use, such as those of a vision tower.
        experts: parameters of mixtures of experts, in the order in which PEFT wraps the parameters of a layer.
        matrices: parameters of other modules than linear layers and experts, in the order of a module's parameters.
        transposed: paths of linear layers whose parameters have a row for each input, as in GPT-2.
    """

    prefixes: tuple[str, ...]
    paths: tuple[ModulePath, ...]
    unused: tuple[str, ...] = ()
    experts: tuple[ExpertsPath, ...] = ()
    matrices: tuple[MatrixPath, ...] = ()
    transposed: tuple[str, ...] = ()

    def with_paths(self, paths: tuple[ModulePath, ...]) -> "ModuleNames":
        """Return the names with further linear layers."""
        return msgspec.structs.replace(self, paths=(*self.paths, *paths))


PREFIXES = ("model.", "model.language_model.", "language_model.model.", "model.text_model.")
"""Where checkpoints keep the decoder: alone, and beside a vision tower in new and old versions of transformers."""

UNUSED_PARTS = (
    "model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.vision_model.", "vision_model.",
    "model.multi_modal_projector.", "multi_modal_projector.", "model.connector.", "model.audio_tower.",
    "model.embed_vision.", "model.embed_audio.", "model.vision_embed_tokens", "model.embed_tokens_extend.",
)  # fmt: skip
"""Names of the parts of a model that read images and sound."""

DECODER_NAMES = ModuleNames(
    PREFIXES,
    (
        ModulePath("layers.{}.self_attn.q_proj", ("q",)),
        ModulePath("layers.{}.self_attn.k_proj", ("k",)),
        ModulePath("layers.{}.self_attn.v_proj", ("v",)),
        ModulePath("layers.{}.self_attn.o_proj", ("o",)),
        ModulePath("layers.{}.mlp.gate_proj", ("gate",)),
        ModulePath("layers.{}.mlp.up_proj", ("up",)),
        ModulePath("layers.{}.mlp.down_proj", ("down",)),
        ModulePath("layers.{}.self_attn.qkv_proj", ("q", "k", "v")),
        ModulePath("layers.{}.mlp.gate_up_proj", ("gate", "up")),
    ),
    UNUSED_PARTS,
)
"""Of the own decoder, split as in Llama or fused as in Phi-3."""


class ReplaceableWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """The weights of a base besides linear modules that an adapter may replace, such as vocabulary and norms.

    Attributes:
        embedding, head: names of the embedding and of the output layer, below the prefix; "" if they cannot be changed.
        vocab_size: number of rows of both. The number of columns is ``ModelGeometry.hidden_size``.
        vectors: number of elements of each vector, such as a norm's, by path (see ``ModulePath``) with ``.weight`` or
            ``.bias`` at the end.
    """

    embedding: str
    head: str
    vocab_size: int
    vectors: dict[str, int]


class TowerModules(msgspec.Struct, frozen=True):
    """The parts of a model that compute images: its vision tower and projector.

    Attributes:
        prefix: the beginning of their names that adapters may leave out, such as ``model.``; "" for none.
        parts: beginnings of the names of all their parameters, below the prefix.
        parameters: shape of each parameter, by its name below the prefix.
        adaptable: names of the linear layers and convolutions among them, on which LoRA is supported.
    """

    prefix: str
    parts: tuple[str, ...]
    parameters: dict[str, tuple[int, ...]]
    adaptable: frozenset[str]


class ModelGeometry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sizes of one decoder, or of one tensor-parallel rank's share of it.

    Attributes:
        layers: number of decoder layers.
        kv_heads: number of key/value heads of a layer (of one rank's share, in a rank's geometry).
        head_dim: number of elements of one head.
        modules: shape of each linear module of a layer that an adapter may change, in packing order. Our decoder's
            modules are :data:`LORA_MODULES`.
        dtype_bytes: bytes of one element of KV and adapter weights. Block sizes are counted in such elements.
        kv_layers: the KV of a token on each layer, if layers differ. It replaces ``kv_heads`` and ``head_dim``, and may
            have fewer entries than there are layers. Empty if all layers have ``kv_heads`` and ``head_dim``.
        module_layers: the layers that have a module, for modules that not all layers have.
        names: the names that adapters use for modules. None for :data:`DECODER_NAMES`.
        replaceable: other weights that adapters may replace; None for none.
        hidden_size: number of elements of a hidden state. 0 if it is not known; adapters then have no score heads.
        first_layer, stages: index of a pipeline stage's first layer in the whole model, and the number of stages. A
            stage has ``layers`` layers.
        lora_bits: 8 if A and B of adapters are stored as codes of 8 bits with a scale for each rank row; 0 if they are
            stored in the dtype.
        kv_bits: 8 if keys and values are stored as codes of 8 bits with a scale for each token and head; 0 if they are
            stored in the dtype.
        states: the state that layers carry from token to token for each sequence. Empty if all layers have only keys
            and values.
        has_kv: whether a layer has keys and values. False for models whose layers all have a state instead.
        tower: the parts that compute images; None if prompts have none.
        adapts_rows: whether an adapter can act on some tokens of a sequence only (aLoRA).
    """

    layers: int
    kv_heads: int
    head_dim: int
    modules: dict[str, ModuleShape]
    dtype_bytes: int
    kv_layers: tuple[KvShape, ...] = ()
    module_layers: dict[str, tuple[int, ...]] = {}
    names: ModuleNames | None = None
    replaceable: ReplaceableWeights | None = None
    hidden_size: int = 0
    first_layer: int = 0
    stages: int = 1
    lora_bits: int = 0
    kv_bits: int = 0
    states: tuple[StateShape, ...] = ()
    has_kv: bool = True
    tower: TowerModules | None = None
    adapts_rows: bool = True

    def shape_of(self, module: str) -> ModuleShape:
        """Return the shape of a module, or of :data:`SCORE`."""
        return ModuleShape(self.hidden_size, 0) if module == SCORE else self.modules[module]

    def row_elements(self, module: str) -> int:
        """Return the number of elements of a block that one rank row of A and of Bᵀ takes."""
        shape = self.shape_of(module)
        if not self.has_codes(module):
            return shape.in_features + shape.out_features
        return -(-(shape.in_features + shape.out_features + SCALE_BYTES) // self.dtype_bytes)

    def has_codes(self, module: str) -> bool:
        """Return whether A and B of a module are stored as codes of 8 bits. A score head never is."""
        return self.lora_bits == 8 and module != SCORE

    @property
    def module_slots(self) -> int:
        """Number of entries of one layer in tables of modules.

        It is the number of modules rounded up to a multiple of seven, which the native kernels require.
        """
        return -(-len(self.modules) // len(LORA_MODULES)) * len(LORA_MODULES)

    @property
    def whole(self) -> "ModelGeometry":
        """The geometry of all pipeline stages together."""
        return msgspec.structs.replace(self, layers=self.layers * self.stages, first_layer=0, stages=1)

    @property
    def sizes(self) -> "ModelGeometry":
        """The geometry without derived fields and element sizes, for comparing models."""
        return msgspec.structs.replace(self, replaceable=None, hidden_size=0, lora_bits=0, kv_bits=0, tower=None)

    def has_module(self, layer: int, module: str) -> bool:
        """Return whether a layer has a module."""
        return module in self.modules and layer in self.module_layers.get(module, range(self.layers))

    def full_ranks(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return ``AdapterRef.ranks`` of an adapter of all modules except experts, on the layers of all stages."""
        layers = self.layers * self.stages
        paths = () if self.names is None else self.names.experts
        of_experts = {module for path in paths for expert in range(path.experts) for module in path.modules_of(expert)}
        return {
            module: tuple(rank if self.whole.has_module(layer, module) else 0 for layer in range(layers))
            for module in self.modules
            if module not in of_experts
        }

    def kv_shapes(self) -> tuple[KvShape, ...]:
        """Return the KV of one token on each layer that has keys and values."""
        if not self.has_kv:
            return ()
        return self.kv_layers or (KvShape(self.kv_heads, self.head_dim, self.head_dim),) * self.layers

    def kv_elements_per_token(self) -> int:
        """Return the number of elements that the keys and values of one token take over all layers.

        Raises:
            ValueError: keys and values are codes, and do not fill whole elements.
        """
        if not self.kv_bits:
            return sum(shape.elements for shape in self.kv_shapes())
        elements, rest = divmod(
            sum(shape.elements + 2 * shape.heads * KV_SCALE_BYTES for shape in self.kv_shapes()), self.dtype_bytes
        )
        if rest:
            raise ValueError(f"keys and values in 8 bits do not fill whole elements of {self.dtype_bytes} bytes")
        return elements

    def block_elements(self, block_size: int) -> int:
        """Return the number of elements of a block that holds ``block_size`` tokens of KV over all layers.

        If layers have a state, a block also holds any part of it, and without KV a rank row of any module.
        """
        elements = block_size * self.kv_elements_per_token()
        if not self.states:
            return elements
        least = max(state.part_bytes for state in self.states)
        if not elements:
            least = max(least, *(self.row_elements(module) * self.dtype_bytes for module in self.modules), 0)
        return aligned(max(elements * self.dtype_bytes, least)) // self.dtype_bytes

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block that holds ``block_size`` tokens of KV over all layers."""
        return self.block_elements(block_size) * self.dtype_bytes

    def state_blocks(self, block_size: int) -> int:
        """Return the number of blocks that the state of one sequence takes; 0 without a state."""
        return place_states(self.states, self.block_bytes(block_size)).blocks if self.states else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token over all layers."""
        return self.kv_elements_per_token() * self.dtype_bytes


_LAYER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,5})(?![^.])")
"""The first part of a name that is a number: the layer."""


def split_layer(name: str) -> tuple[str, int]:
    """Return a name with ``{}`` instead of the layer, and the layer. A name without a layer belongs to layer 0."""
    match = _LAYER.search(name)
    if match is None:
        return name, 0
    return f"{name[: match.start()]}{{}}{name[match.end() :]}", int(match[0])
