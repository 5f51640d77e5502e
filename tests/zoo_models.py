# SPDX-License-Identifier: BSD-3-Clause
"""zoo_models: small random-weight models of many families, built offline from configs.

    ZOO[name]()  ->  (model, batch): batch(i) gives the keyword arguments of micro-batch i; batches 0 and 1 differ in length

Dropout, layer drop and router noise are on where the family has them. Needs transformers for all but three.
"""

import torch
from torch import nn

VOCABULARY = 61
ZOO = {}
LENGTHS = (12, 7)
TINY = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def zoo(build):
    ZOO[build.__name__] = build
    return build


def drawn(i):
    return torch.Generator().manual_seed(100 + i)


# ------------------------------------------------------------------------------------------------- batches
def tokens(i):
    ids = torch.randint(4, VOCABULARY, (2, LENGTHS[i]), generator=drawn(i))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def without_cache(i):
    return dict(tokens(i), use_cache=False)


def pictures(i):
    n = (3, 2)[i]
    return {"pixel_values": torch.randn(n, 3, 32, 32, generator=drawn(i)), "labels": torch.arange(n)}


def sounds(i):
    labels = torch.randint(4, VOCABULARY, (2, LENGTHS[i]), generator=drawn(i))
    return {"input_features": torch.randn(2, 8, 32, generator=drawn(i)), "labels": labels, "use_cache": False}


def vectors(i):
    return {"x": torch.randn(2, LENGTHS[i], 16, generator=drawn(i))}


# ------------------------------------------------------------------------------------------------- decoders
@zoo
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, attention_dropout=0.1)), tokens


@zoo
def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM
    return Qwen3ForCausalLM(Qwen3Config(**TINY, num_key_value_heads=2, head_dim=8)), without_cache


@zoo
def gemma():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    config = Gemma3TextConfig(**TINY, num_key_value_heads=2, head_dim=8, sliding_window=5,
                              layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    return Gemma3ForCausalLM(config), without_cache


@zoo
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0.1,
                        embd_pdrop=0.1, attn_pdrop=0.1)
    return GPT2LMHeadModel(config), without_cache


@zoo
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM
    config = MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
                           output_router_logits=True, router_aux_loss_coef=0.1, router_jitter_noise=0.1)
    return MixtralForCausalLM(config), without_cache


@zoo
def mamba():
    from transformers import MambaConfig, MambaForCausalLM
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=3, time_step_rank=4)
    return MambaForCausalLM(config), lambda i: {k: v for k, v in without_cache(i).items() if k != "attention_mask"}


# ------------------------------------------------------------------------------------------------- encoders
@zoo
def bert():
    from transformers import BertConfig, BertForMaskedLM
    return BertForMaskedLM(BertConfig(**TINY)), tokens


@zoo
def albert():  # one block, called three times
    from transformers import AlbertConfig, AlbertForMaskedLM
    config = AlbertConfig(**TINY, embedding_size=16, num_hidden_groups=1, inner_group_num=1, hidden_dropout_prob=0.1,
                          attention_probs_dropout_prob=0.1)
    return AlbertForMaskedLM(config), tokens


@zoo
def t5():
    from transformers import T5Config, T5ForConditionalGeneration
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.1,
                      decoder_start_token_id=0)
    return T5ForConditionalGeneration(config), without_cache


@zoo
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration
    config = WhisperConfig(vocab_size=VOCABULARY, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
                           decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
                           max_source_positions=16, max_target_positions=32, encoder_layerdrop=0.4, decoder_layerdrop=0.4,
                           dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    return WhisperForConditionalGeneration(config), sounds


# ------------------------------------------------------------------------------------------------- vision
@zoo
def vit():
    from transformers import ViTConfig, ViTForImageClassification
    config = ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=32,
                       patch_size=8, num_labels=3, hidden_dropout_prob=0.1)
    return ViTForImageClassification(config), pictures


@zoo
def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config), pictures


# ------------------------------------------------------------------------------------------------- torch alone
class Scored(nn.Module):
    """A body whose output becomes a loss."""

    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.body(x)).square().mean()


@zoo
def torch_encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return Scored(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)), vectors


class InPlaceBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.2, inplace=True)

    def forward(self, x):
        h = self.up(x).add_(0.5).mul_(1.5)
        h[..., ::2].clamp_(max=2.0)
        h.transpose(0, 1)[1].mul_(0.5)
        return x + self.down(self.drop(h).relu_()).tanh_()


@zoo
def in_place():
    return Scored(nn.Sequential(*[InPlaceBlock() for _ in range(3)])), vectors


class RunningMeanBlock(nn.Module):
    """Reads and writes its own buffers, counts in one, and has BatchNorm inside."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        h = self.norm(self.linear(x - self.mean).transpose(1, 2)).transpose(1, 2)
        return x + h.tanh() / self.calls.clone()


@zoo
def running_mean():
    return Scored(nn.Sequential(*[RunningMeanBlock() for _ in range(3)])), vectors
