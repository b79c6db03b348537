"""Which parameters are dedicated when the user does not say, for models of many makes."""

import copy
import functools
import logging
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dmuon
import layouts
from dmuon.selection import block_modules, candidates, predicate_warning, small_share_warning, why_not
from models import Block, Transformer, agreed, dedicate, loss_of, make_mesh, shard

WIDTH, VOCAB = 6, 11
# The matrices of `Block`, in module order.
BLOCK = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "q_small"]


def chosen(shape: tuple[int, ...], make: Callable[[], nn.Module]) -> list[str]:
    """The names that `dedicate_params` chooses by itself; on the meta device too."""
    mesh = make_mesh(shape)
    names = [record.param_name for record in dedicate(make(), mesh)]
    with torch.device("meta"):
        on_meta = make()
    assert [record.param_name for record in dedicate(on_meta, mesh)] == names
    return names


def assert_chosen(ranks, make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert agreed(ranks, (2,), chosen, make) == expected


def default(make: Callable[[], nn.Module]) -> list[str]:
    """The names that no reason speaks against; on the meta device too."""
    model = make()
    reasons = why_not(model)
    with torch.device("meta"):
        assert why_not(make()) == reasons
    return [candidate.name for candidate in candidates(model) if candidate.name not in reasons]


def in_blocks(*blocks: str, names: list[str] = BLOCK) -> list[str]:
    return [f"{block}.{name}.weight" for block in blocks for name in names]


# Language models


def test_gpt(ranks):
    assert_chosen(ranks, Transformer, in_blocks("layers.0", "layers.1", "layers.2"))


def gpt_with_tied_head() -> nn.Module:
    model = Transformer(depth=1)
    model.head.weight = model.embed.weight
    return model


def test_tied_head(ranks):
    assert_chosen(ranks, gpt_with_tied_head, in_blocks("layers.0"))


def gpt_with_padded_head() -> nn.Module:
    model = Transformer(depth=1)
    model.head = nn.Linear(WIDTH, 16, bias=False)
    return model


def test_head_with_padded_vocabulary(ranks):
    assert_chosen(ranks, gpt_with_padded_head, in_blocks("layers.0"))


class HeadFirst(nn.Module):
    """A head that is registered before the layers."""

    def __init__(self, head: int = VOCAB) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, head)
        self.blocks = nn.ModuleList([Block(WIDTH, 13)])
        self.embed = nn.Embedding(VOCAB, WIDTH)


def test_head_that_is_registered_first(ranks):
    assert_chosen(ranks, HeadFirst, in_blocks("blocks.0"))


class ValueHead(Transformer):
    """A second head, of one output, beside that of the language model."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.value = nn.Linear(WIDTH, 1)


def test_head_with_one_output_is_a_vector(ranks):
    assert_chosen(ranks, ValueHead, in_blocks("layers.0"))


class Layer(nn.Module):
    """Something that can be called, as a block can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Conv1D(nn.Module):
    """A linear layer that keeps its weight transposed."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(into, out).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(out))


class Gpt2Block(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(3 * width, width), "c_proj": Conv1D(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(4 * width, width), "c_proj": Conv1D(width, 4 * width)})


class Gpt2(nn.Module):
    """The names and classes of GPT-2; its context is as long as it is wide."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(WIDTH, WIDTH),
                "h": nn.ModuleList(Gpt2Block(WIDTH) for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight


def gpt2() -> nn.Module:
    return Gpt2(tied=True)


def gpt2_untied() -> nn.Module:
    return Gpt2(tied=False)


@pytest.mark.parametrize("make", [gpt2, gpt2_untied])
def test_gpt2(ranks, make):
    matrices = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert_chosen(ranks, make, in_blocks("transformer.h.0", "transformer.h.1", names=matrices))


class Unrolled(nn.Module):
    """Layers that stand in no list, and a position for each of the width's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(WIDTH, WIDTH)
        self.first = Block(WIDTH, 13)
        self.second = Block(WIDTH, 13)
        self.head = nn.Linear(WIDTH, VOCAB)


def test_layers_in_no_list(ranks):
    assert_chosen(ranks, Unrolled, in_blocks("first", "second"))


class Bert(nn.Module):
    """A pooler, which is a hidden layer, and a classifier, which is a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {"word": nn.Embedding(VOCAB, WIDTH), "token_type": nn.Embedding(2, WIDTH)}
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList([Block(WIDTH, 13)])})
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, 3)


def test_bert_classifier(ranks):
    assert_chosen(ranks, Bert, [*in_blocks("encoder.layer.0"), "pooler.weight"])


class EncoderDecoder(nn.Module):
    """One embedding for encoder, decoder and head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleDict({"embed": self.shared, "blocks": nn.ModuleList([Block(WIDTH, 13)])})
        self.decoder = nn.ModuleDict({"embed": self.shared, "blocks": nn.ModuleList([Block(WIDTH, 13)])})
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.shared.weight


def test_encoder_decoder_with_one_embedding(ranks):
    assert_chosen(ranks, EncoderDecoder, in_blocks("encoder.blocks.0", "decoder.blocks.0"))


class MixtureLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 9), "down": nn.Linear(9, WIDTH)}) for _ in range(3)
        )


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([MixtureLayer()])
        self.head = nn.Linear(WIDTH, VOCAB)


def test_mixture_of_experts(ranks):
    experts = [f"experts.{e}.{matrix}" for e in range(3) for matrix in ("up", "down")]
    assert_chosen(ranks, Mixture, in_blocks("layers.0", names=["attention", "router", *experts]))


# Blocks in dictionaries, and the stages of a pipeline, as in torchtitan


class TitanLayer(Layer):
    """As many heads as make one of its widths the size of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Titan.named(wq=nn.Linear(WIDTH, VOCAB), wo=nn.Linear(VOCAB, WIDTH))
        self.feed_forward = Titan.named(w1=nn.Linear(WIDTH, 13), w2=nn.Linear(13, WIDTH))


class OtherTitanLayer(TitanLayer):
    pass


class Titan(nn.Module):
    """A language model whose stages keep their layers' numbers, and None for what they have not."""

    def __init__(self, first: bool = True, layers: Sequence[int] = (0, 1), last: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH) if first else None
        self.layers = nn.ModuleDict({str(n): (OtherTitanLayer if n % 2 else TitanLayer)() for n in layers})
        self.norm = nn.RMSNorm(WIDTH) if last else None
        self.output = nn.Linear(WIDTH, VOCAB, bias=False) if last else None

    @staticmethod
    def named(**children: nn.Module) -> nn.Module:
        module = Layer()
        for name, child in children.items():
            setattr(module, name, child)
        return module


TITAN = ["attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"]


def test_blocks_in_a_dictionary(ranks):
    assert_chosen(ranks, Titan, in_blocks("layers.0", "layers.1", names=TITAN))


@pytest.mark.parametrize(
    ("first", "layers", "last"),
    [
        *[(True, (0,), False), (True, (0, 1), False), (False, (1,), False), (False, (2, 3), False)],
        *[(False, (3,), True), (False, (2, 3), True), (True, (0,), True)],
    ],
)
def test_stages_of_a_pipeline_are_chosen_as_the_whole_model(first, layers, last):
    whole, stage = default(lambda: Titan(layers=range(4))), default(lambda: Titan(first, layers, last))
    assert stage == [name for name in whole if name.startswith(tuple(f"layers.{n}." for n in layers))]


def test_a_stage_of_layers_in_no_list():
    """Its last matrix gives out what the first one takes in: it is no head."""
    stage = functools.partial(Titan.named, first=TitanLayer(), second=TitanLayer())
    assert default(stage) == in_blocks("first", "second", names=TITAN)


def test_dictionaries_that_are_lists_of_blocks():
    block = functools.partial(Block, WIDTH, 13)
    assert list(block_modules(nn.ModuleDict({"a": block(), "b": block()}))) == ["a", "b"]
    assert list(block_modules(nn.ModuleDict({"3": block(), "4": TitanLayer()}))) == ["3", "4"]
    # One thing's parts, inside of a block or not, single layers, and whole models.
    parts = nn.ModuleDict({"attn": block(), "mlp": TitanLayer()})
    assert not block_modules(parts)
    assert list(block_modules(nn.ModuleList([Titan.named(parts=parts)]))) == ["0"]
    assert list(block_modules(nn.ModuleList([Titan.named(parts=nn.ModuleDict({"0": block()}))]))) == ["0"]
    assert not block_modules(nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3)}))
    assert not block_modules(nn.ModuleDict({"model": block()}))
    both = nn.ModuleDict({"actor": Transformer(depth=1), "critic": Transformer(depth=1)})
    assert list(block_modules(both)) == ["actor.layers.0", "critic.layers.0"]


def test_two_models_in_a_dictionary():
    def both() -> nn.Module:
        return nn.ModuleDict({"actor": Transformer(depth=1), "critic": Transformer(depth=1)})

    assert default(both) == in_blocks("actor.layers.0", "critic.layers.0")


class NamesItsBlocks(nn.Module):
    """A model of the make of transformers whose blocks stand in no list."""

    _no_split_modules = ("Wrapped", "TokenEmbeddings")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = TokenEmbeddings()
        self.first = Wrapped()
        self.stack = nn.ModuleList([Titan.named(inner=Wrapped())])
        self.last = Wrapped()


class TokenEmbeddings(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)


class Wrapped(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, VOCAB)
        self.outer = nn.Linear(VOCAB, WIDTH)


def test_blocks_that_the_model_names():
    assert list(block_modules(NamesItsBlocks())) == ["first", "stack.0", "last"]  # the outermost ones
    names = ["inner", "outer"]
    assert default(NamesItsBlocks) == in_blocks("first", "stack.0.inner", "last", names=names)
    model = NamesItsBlocks()
    model.first.__class__ = type("FSDPWrapped", (Wrapped,), {})  # as `fully_shard` does
    assert "first" in block_modules(model)


# Embeddings and heads that are not torch's, or several


class Table(nn.Module):
    def __init__(self, rows: int = VOCAB) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, WIDTH).normal_())


class TokenEmbedding(Table):
    pass


class Tokens(TokenEmbedding):
    pass


class RotaryEmbedding(nn.Module):
    pass


class Speaking(nn.Module):
    """A model that says which are its embeddings and heads, as transformers models do."""

    def __init__(self, table: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.table, self.head = table, head
        self.layers = nn.ModuleList([Block(WIDTH, 13)])
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


class Silent(Speaking):
    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def get_output_embeddings(self) -> nn.Module:
        return self.lost  # an AttributeError


HIDDEN = [*in_blocks("layers.0"), "pooler.weight"]


def patches() -> nn.Module:
    return Titan.named(projection=nn.Linear(12, WIDTH))


@pytest.mark.parametrize("table", [Table, patches], ids=["table", "patches"])
def test_the_embedding_that_the_model_says(table):
    model = functools.partial(Speaking, table(), nn.Linear(WIDTH, WIDTH))
    reasons = why_not(model())
    said = {name for name, reason in reasons.items() if reason == "embedding: get_input_embeddings"}
    assert said == {name for name, _ in model().named_parameters() if name.startswith("table.")}
    assert reasons["head.weight"] == "head: get_output_embeddings"
    assert default(model) == HIDDEN
    wrapped = why_not(nn.ModuleDict({"inner": model()}))
    assert wrapped == {f"inner.{name}": reason for name, reason in reasons.items()}


@pytest.mark.parametrize("table", [TokenEmbedding, Tokens])
def test_an_embedding_by_the_name_of_its_class(table):
    model = functools.partial(Silent, table(), nn.Linear(WIDTH, VOCAB))
    reasons = why_not(model())
    assert reasons["table.weight"] == "embedding: guessed by the name of its class"
    assert reasons["head.weight"] == "head: a row for each entry of an embedding"
    assert default(model) == HIDDEN


def test_methods_that_find_nothing_and_rotary_embeddings():
    """A part of a model that has neither embedding nor head."""
    model = Silent(RotaryEmbedding())
    del model.layers, model.pooler
    model.layer = TitanLayer()
    assert not why_not(model).keys() & {f"layer.{name}.weight" for name in TITAN}


class Heads(Transformer):
    """More heads beside that of the language model, registered before or after."""

    def __init__(self, head: int, **others: int) -> None:
        super().__init__(depth=1)
        self.head = nn.Linear(WIDTH, head, bias=False)
        for name, outputs in others.items():
            setattr(self, name, nn.Linear(WIDTH, outputs))


@pytest.mark.parametrize(
    "model",
    [
        functools.partial(Heads, VOCAB, other=VOCAB),
        functools.partial(Heads, VOCAB, value=7),
        functools.partial(Heads, 16, other=16),
        functools.partial(Heads, 16, value=7),
        functools.partial(Heads, 16, a=7, b=8, c=1),
    ],
    ids=["two", "value", "two_padded", "padded_and_value", "many"],
)
def test_several_heads(model):
    assert default(model) == in_blocks("layers.0")


def tied_head_and_value_head() -> nn.Module:
    model = Heads(VOCAB, value=7)
    model.head.weight = model.embed.weight
    model.pooler = nn.Linear(WIDTH, WIDTH)
    return model


def test_a_value_head_beside_a_tied_head():
    assert default(tied_head_and_value_head) == HIDDEN
    assert why_not(tied_head_and_value_head())["embed.weight"] == "embedding, tied"


def encoders_with_one_table() -> nn.Module:
    """The embeddings are tied to one another, not to a head."""
    model = Heads(3)
    model.more = nn.Embedding(VOCAB, WIDTH)
    model.more.weight = model.embed.weight
    return model


def test_a_classifier_beside_tied_embeddings():
    assert default(encoders_with_one_table) == in_blocks("layers.0")


def test_hidden_layers_beside_a_head_in_a_model_without_blocks():
    def flat() -> nn.Module:
        qkv, up, down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        embed, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        return Titan.named(embed=embed, qkv=qkv, up=up, down=down, head=head)

    assert default(flat) == ["qkv.weight", "up.weight", "down.weight"]


def test_a_linear_layer_that_takes_in_as_many_as_there_are_tokens():
    """Only its rows could make it a head."""
    assert "into.weight" in default(lambda: Titan.named(into=nn.Linear(VOCAB, 4), inner=Transformer(depth=1)))


def test_a_guess_takes_what_stands_beside_the_last_matrix_only():
    """Without blocks too, where there is an embedding."""

    def model() -> nn.Module:
        inner = Titan.named(up=nn.Linear(WIDTH, 13), down=nn.Linear(13, WIDTH))
        return Titan.named(embed=nn.Embedding(VOCAB, WIDTH), inner=inner, head=nn.Linear(WIDTH, 13))

    assert default(model) == ["inner.up.weight", "inner.down.weight"]


def test_tables_inside_of_blocks_are_no_vocabulary():
    """Such as those of relative positions."""

    def model() -> nn.Module:
        made = Transformer(depth=1)
        made.layers[0].positions = nn.Embedding(5, 2)
        made.inner = Titan.named(hidden=nn.Linear(WIDTH, 5))
        return made

    assert default(model) == [*in_blocks("layers.0"), "inner.hidden.weight"]


class Clip(nn.Module):
    """Texts and images are projected to one space, which is as wide as the texts."""

    def __init__(self) -> None:
        super().__init__()
        texts = {"tokens": nn.Embedding(VOCAB, WIDTH), "positions": nn.Embedding(7, WIDTH)}
        self.text_model = Titan.named(**texts, layers=nn.ModuleList([Block(WIDTH, 13)]))
        images = {"patches": nn.Conv2d(3, 8, 2), "positions": nn.Embedding(5, 8)}
        self.vision_model = Titan.named(**images, layers=nn.ModuleList([Block(8, 13)]))
        self.visual_projection = nn.Linear(8, WIDTH, bias=False)
        self.text_projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


def test_two_projections_of_one_kind_are_treated_alike():
    assert default(Clip) == in_blocks("text_model.layers.0", "vision_model.layers.0")
    reasons = why_not(Clip())
    assert reasons["text_projection.weight"] == "head: guessed, last matrix outside the blocks"
    assert reasons["visual_projection.weight"].startswith("head: guessed, beside the last matrix")
    assert reasons["logit_scale"] == "vector"


# Other models


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.encoder = nn.ModuleDict({"blocks": nn.ModuleList([Block(WIDTH, 13), Block(WIDTH, 13)])})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)


def test_vision_transformer(ranks):
    assert_chosen(ranks, VisionTransformer, in_blocks("encoder.blocks.0", "encoder.blocks.1"))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def test_perceptron(ranks):
    assert_chosen(ranks, perceptron, ["0.weight", "2.weight"])


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=13)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, 3)


def test_torchs_encoder_layers(ranks):
    matrices = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    expected = [f"encoder.layers.{layer}.{name}" for layer in range(2) for name in matrices]
    assert_chosen(ranks, TorchEncoder, expected)


class CrossAttention(nn.Module):
    """Three input projections, as torch keeps them for keys and values of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=5)])
        self.out = nn.Linear(WIDTH, 3)


def test_attention_with_separate_projections(ranks):
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    assert_chosen(ranks, CrossAttention, [f"blocks.0.{name}" for name in names])


class Recurrent(nn.Module):
    """The gates of a recurrent layer, stacked in one tensor, are no matrix to orthogonalize."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 7)
        self.hidden = nn.Linear(7, 5)
        self.head = nn.Linear(5, VOCAB)


def test_recurrent(ranks):
    assert_chosen(ranks, Recurrent, ["hidden.weight"])


class ScaledLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))


class LowRankLinear(nn.Module):
    """A linear class of somebody else's, with a norm of its own beside the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 4).normal_())


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class ScaledEmbedding(nn.Embedding):
    pass


class CustomLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.one = ScaledLinear()
        self.two = LowRankLinear()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = ScaledEmbedding(VOCAB, WIDTH)
        self.stack = nn.Sequential(CustomLayer(), CustomLayer())
        self.head = ScaledLinear()


def test_linear_classes_of_other_makes(ranks):
    assert_chosen(ranks, Custom, in_blocks("stack.0", "stack.1", names=["one", "two"]))


# Reasons, and warnings


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(WIDTH, 13)])
        self.layers[0].experts = Titan.named()
        self.layers[0].experts.up = nn.Parameter(torch.empty(9, 20, WIDTH).normal_())
        self.layers[0].lora = nn.Parameter(torch.ones(3, WIDTH))
        self.lstm = nn.LSTM(WIDTH, 7)
        self.tied, self.twin = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.twin.weight = self.tied.weight
        self.conv = nn.Conv1d(2, 8, 3)
        self.row = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, VOCAB)


def test_the_reason_why_not():
    reasons = why_not(Experts())
    expected = {
        "embed.weight": "embedding",
        "layers.0.experts.up": "3-D: stack of matrices",
        "layers.0.lora": "not the weight of a layer",
        "lstm.weight_ih_l0": "recurrent layer",
        "tied.weight": "tied",
        "conv.weight": "3-D: convolution",
        "row.weight": "vector",
        "head.weight": "head: a row for each entry of an embedding",
        "head.bias": "vector",
    }
    assert {name: reasons[name] for name in expected} == expected
    assert why_not(gpt_with_tied_head())["embed.weight"] == "embedding, tied"
    padded = why_not(gpt_with_padded_head())
    assert padded["head.weight"] == "head: guessed, last matrix outside the blocks"
    wrapped = Transformer()
    wrapped.head, wrapped.layers[0] = checkpoint_wrapper(wrapped.head), checkpoint_wrapper(wrapped.layers[0])
    assert why_not(wrapped) == why_not(Transformer())


def reasons_before_and_after(shape: tuple[int, ...]) -> list[dict[str, str]]:
    model, mesh = Transformer(depth=1), make_mesh(shape)
    found = [why_not(model)]
    dedicate(model, mesh)
    found.append(why_not(model))
    shard(model, mesh)
    optimizer = dmuon.Muon(model)
    found.append(why_not(model))
    loss_of(model, seed=dist.get_rank()).backward()
    optimizer.step()
    return [*found, why_not(model)]


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_reasons_do_not_change_when_the_model_is_distributed(ranks, shape):
    first, *others = agreed(ranks, shape, reasons_before_and_after)
    assert others == [first] * 3


def chosen_by(model: nn.Module, predicate: Callable[[str, nn.Parameter], bool]) -> list:
    return [candidate for candidate in candidates(model) if predicate(candidate.name, candidate.param)]


def test_a_warning_where_muon_gets_little():
    model = Experts()
    hidden = chosen_by(model, lambda name, p: name not in why_not(model))
    text = small_share_warning(model, hidden)
    share = sum(c.param.numel() for c in hidden) / sum(p.numel() for p in model.parameters())
    assert share < 0.5
    assert f"{share:.0%}" in text
    assert "3-D: stack of matrices (such as layers.0.experts.up)" in text
    # Frozen parameters do not count, on either side.
    model.layers[0].experts.requires_grad_(False)
    model.lstm.requires_grad_(False)
    assert small_share_warning(model, hidden) is None


def test_a_warning_where_a_predicate_gives_muon_little():
    model = Transformer()
    text = small_share_warning(model, chosen_by(model, lambda name, p: "q_proj" in name))
    assert "left out by the predicate" in text
    assert small_share_warning(model, chosen_by(model, lambda name, p: p.ndim == 2)) is None


def test_a_warning_where_a_predicate_takes_an_embedding_or_a_head():
    model = gpt_with_padded_head()
    text = predicate_warning(model, chosen_by(model, lambda name, p: p.ndim == 2))
    assert "embed.weight (embedding)" in text
    assert "head.weight (head: guessed, last matrix outside the blocks)" in text
    assert predicate_warning(model, chosen_by(model, lambda name, p: "_proj.weight" in name)) is None


# One of each kind, as it is trained


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv2d(2, 8, 3)
        self.depthwise = nn.Conv1d(4, 4, 3, groups=4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(self.norm(self.wte(tokens)))  # [batch, length, 4]
        hidden = self.depthwise(F.pad(hidden.transpose(1, 2), (1, 1))).transpose(1, 2)
        return self.head(hidden).logsumexp(-1).mean() + self.conv(images).square().mean()


def test_only_linear_layers_of_one_of_each_kind(ranks):
    assert_chosen(ranks, Everything, ["linear.weight"])


def distribute_everything(model: nn.Module, sizes: layouts.Sizes) -> None:
    mesh = layouts.make_mesh(sizes)
    if "tp" in sizes:
        plan = {"linear": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan)
    if "ddp" in sizes:
        tp = "_tp" if "tp" in sizes else ""
        getattr(dmuon, f"dedicate_params_ddp{tp}")(model, mesh["dp"])
        getattr(dmuon, f"replicate{tp}")(model, mesh["dp"])
    else:
        layouts.dedicate(model, mesh, predicate=None)
        fully_shard(model, mesh=mesh["replicate", "shard"] if "replicate" in sizes else mesh["dp"])


def groups_of_everything(sizes: layouts.Sizes) -> tuple[dict[str, list[str]], str]:
    """The names in each algorithm's groups, and the logged summary."""
    model = Everything()
    distribute_everything(model, sizes)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dmuon")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        optimizer = dmuon.Muon(model)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert model.head.weight is model.wte.weight
    names = {id(p): name for name, p in model.named_parameters()}
    groups: dict[str, list[str]] = {"muon": [], "adamw": []}
    for group in optimizer.param_groups:
        groups[group["algorithm"]] += [names[id(p)] for p in group["params"]]
    model(torch.arange(6).view(2, 3), torch.ones(1, 2, 4, 4)).backward()
    before = {name: dmuon.full_tensor(p).detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, param in model.named_parameters():
        assert not torch.equal(dmuon.full_tensor(param), before[name]), f"{name} is not trained"
    return groups, "\n".join(messages)


@pytest.mark.parametrize("sizes", layouts.LAYOUTS)
def test_every_kind_has_its_algorithm(ranks, sizes):
    groups, table = agreed(ranks, sizes, groups_of_everything)
    assert groups["muon"] == ["linear.weight"]
    everything = [name for name, _ in Everything().named_parameters()]
    assert sorted(groups["adamw"]) == sorted(set(everything) - {"linear.weight"})
    assert groups["adamw"].count("wte.weight") == 1
    assert table.count("wte.weight") == 1
    assert "head.weight" not in table


# Predicates


def seen_by_predicate(shape: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """What a predicate is asked about, and what comes of its answers."""
    model, mesh = Transformer(depth=1), make_mesh(shape)
    model.layers[0].k_proj.weight.requires_grad_(False)
    asked = []

    def predicate(name: str, param: nn.Parameter) -> bool:
        assert dict(model.named_parameters())[name] is param
        asked.append(name)
        return name.endswith(("_proj.weight", "head.weight"))

    records = dedicate(model, mesh, predicate=predicate)
    return asked, [record.param_name for record in records]


def test_a_predicate_is_asked_once_about_every_parameter(ranks):
    asked, names = agreed(ranks, (2,), seen_by_predicate)
    assert asked == [name for name, _ in Transformer(depth=1).named_parameters()]
    # It may choose a head; a frozen matrix is left out.
    trainable = [name for name in BLOCK if name.endswith("_proj") and name != "k_proj"]
    assert names == [*in_blocks("layers.0", names=trainable), "head.weight"]


def names_in_other_order(shape: tuple[int, ...]) -> list[list[str]]:
    """The choice for a model, its deep copy, and the model inside a wrapper, without the wrapper's prefix."""
    mesh, model = make_mesh(shape), Transformer(depth=1)
    models = [copy.deepcopy(model), copy.deepcopy(model), nn.ModuleDict({"inner": copy.deepcopy(model)})]
    return [[r.param_name.removeprefix("inner.") for r in dedicate(m, mesh)] for m in models]


def test_a_wrapper_changes_no_choice(ranks):
    first, second, wrapped = agreed(ranks, (2,), names_in_other_order)
    assert first == second == wrapped == in_blocks("layers.0")


def choose_after_wrapping_a_part(shape: tuple[int, ...]) -> list[str]:
    """`fully_shard` has taken the embedding before; the rest is still free."""
    model, mesh = Transformer(depth=1), make_mesh(shape)
    fully_shard(model.embed, mesh=mesh)
    return [record.param_name for record in dedicate(model, mesh)]


def test_a_part_may_be_sharded_before_if_nothing_in_it_is_dedicated(ranks):
    assert agreed(ranks, (2,), choose_after_wrapping_a_part) == in_blocks("layers.0")
