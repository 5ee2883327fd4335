"""Pretrained files compute what the libraries that write them compute: transformers, and timm where it can be imported.

pip install torch transformers timm
"""

import json

import jax
import numpy as np
import pytest

from pfl_jax.networks.pretrained import ACTIVATIONS, bert
from pfl_jax.networks.vit import vit

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
