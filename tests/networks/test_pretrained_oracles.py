"""Pretrained files compute what the libraries that write them compute: transformers, and timm where it can be imported.

pip install torch transformers timm
"""

import json

import jax
import numpy as np
import pytest

from pfl_jax.networks.pretrained import ACTIVATIONS, bert
from pfl_jax.networks.vit import HEADS, vit

torch = pytest.importorskip("torch", exc_type=ImportError)

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
IMAGES = np.random.default_rng(0).normal(size=(3, 8, 8, 3)).astype(np.float32)


def randomized(model):
    """The model with random parameters, none of which is 0 or 1, and its arrays."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval(), {name: array.numpy() for name, array in model.state_dict().items()}


def check(path, arrays, wanted, **options):
    np.savez(path, **arrays)
    model = vit(IMAGES.shape[1:], 4, path=path, **options)
    features = model.features(model.init(jax.random.key(0))["backbone"], IMAGES)
    np.testing.assert_allclose(features, wanted.detach().numpy(), atol=5e-5)


def images():
    return torch.tensor(IMAGES.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bert(activation, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        **SIZES, vocab_size=30, intermediate_size=20, max_position_embeddings=9, hidden_act=activation
    )
    model, arrays = randomized(transformers.BertModel(config))
    np.savez(tmp_path / "model.npz", **arrays)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    tokens = np.array([[3, 7, 29, 1, 0, 0], [5, 0, 0, 0, 0, 0], [2, 4, 6, 8, 10, 12]])
    mask = torch.tensor(tokens > 0)
    states = model(torch.tensor(tokens), attention_mask=mask).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    read = bert(tmp_path / "model.npz", 6, 4)
    features = read.features(read.init(jax.random.key(0))["backbone"], tokens)
    np.testing.assert_allclose(features, (mean / mean.norm(dim=-1, keepdim=True)).detach().numpy(), atol=2e-5)


NAMES = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "encoder.layer.": "blocks.",
    "layers.": "blocks.",
    "attention.o_proj": "attn.proj",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "layernorm": "norm",
}
"""Names of transformers -> those of timm."""


def timms(arrays):
    """Arrays of a vision transformer of transformers by timm's names."""
    found = {}
    for name, array in arrays.items():
        for theirs, own in NAMES.items():
            name = name.replace(theirs, own)
        found[name] = array
    for name in [name for name in found if "attention.q_proj" in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("attention.q_proj", "attn.qkv")] = np.concatenate(parts)
    return {name: array for name, array in found.items() if "mask_token" not in name and "pooler" not in name}


@pytest.mark.parametrize("kind", ["ViT", "Dinov2", "Dinov2WithRegisters"])
def test_vision_transformers_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"intermediate_size": 20} if kind == "ViT" else {"mlp_ratio": 2}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes, image_size=8, patch_size=4, layer_norm_eps=1e-6)
    model, arrays = randomized(getattr(transformers, f"{kind}Model")(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"num_heads": SIZES["num_attention_heads"]}}))
    check(tmp_path / "vit.npz", timms(arrays), model(images()).last_hidden_state[:, 0])


def timm():
    # Beside another version of torch its torchvision raises more than ImportError.
    try:
        from timm.models import vision_transformer
    except Exception as error:
        pytest.skip(f"timm cannot be imported: {error}")
    return vision_transformer


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"init_values": 0.1},
        {"init_values": 0.1, "no_embed_class": True},
        {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.1},
        {"reg_tokens": 2, "qk_norm": True},
    ],
)
def test_vision_transformers_of_timm(parts, tmp_path):
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    model, arrays = randomized(timm().VisionTransformer(**sizes, **parts))
    (tmp_path / "config.json").write_text(json.dumps({"global_pool": "token", "model_args": sizes | parts}))
    check(tmp_path / "vit.npz", arrays, model.forward_features(images())[:, 0])


@pytest.mark.slow
def test_heads_of_timms_models():
    """All of its vision transformers that `vit` can read have the number of heads that their width stands for."""
    timm()
    import timm as package

    found, parts = set(), {"cls_token", "blocks.0.attn.qkv.bias", "norm.bias", "pos_embed"}
    for name in package.list_models(module="vision_transformer", exclude_filters="test_*"):
        with torch.device("meta"):
            model = package.create_model(name)
        names = {name for name, _ in model.named_parameters()}
        if parts <= names and "norm_pre.weight" not in names:
            found.add((model.embed_dim, model.blocks[0].attn.num_heads))
    assert len(found) > 5
    for width, heads in found:
        assert HEADS.get(width, width // 64) == heads
