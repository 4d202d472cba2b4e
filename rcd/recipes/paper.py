"""The paper's runs. Values stand beside the words of tab:combined-hyperparams; tests compare them with that table."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rcd.carry.residual import Residual
from rcd.recipes.base import Recipe
from rcd.train.config import TrainConfig

SDAR = TrainConfig(
    data="open-r1/OpenR1-Math-220k",  # "OpenR1-Math-220k (Filtered <= 8K)"
    messages_field="messages",  # problem and reasoning chain; its `solution` column is the short one
    max_length=8192,  # "Max Sequence Length 8,192"; the text says >= 8K, the table and the appendix <= 8K
    betas=(0.9, 0.999),  # "AdamW (beta_1 = 0.9, beta_2 = 0.999)"
    learning_rate=1e-5,  # "Learning Rate 1.0 x 10^-5"
    scheduler="constant_with_warmup",  # "LR Scheduler constant_with_warmup"
    warmup_ratio=0.03,  # "Warmup Ratio 0.03"
    device_batch=1,  # "Batch Size (per device) 1"
    total_batch=96,  # "Total Batch Size 96 (on 8xH100)": 8 x 1 x 12 accumulation steps
    precision="bfloat16",  # "Precision bfloat16"
    noise_per="sequence",  # SDAR's training code draws t per sample
    label_padding="block",
)
LLADA = TrainConfig(
    data="nvidia/OpenMathInstruct-2",  # "OpenMathInstruct-2 (1M subset)"
    split="train_1M",
    prompt_field="problem",
    response_field="generated_solution",
    max_length=2048,  # "Max Sequence Length 2,048"
    learning_rate=1e-5,  # "Learning Rate 1.0 x 10^-5"
    scheduler="cosine",  # "LR Scheduler cosine"; no warm-up is given
    warmup_ratio=0.0,
    epochs=5,  # "Training Epochs 5"
    device_batch=2,  # "Batch Size (per device) 2"
    total_batch=768,  # "Total Batch Size 768 (on 8xH100)": 8 x 2 x 48 accumulation steps
    precision="bfloat16",  # "Precision bfloat16"
    model="GSAI-ML/LLaDA-8B-Base",  # "we fine-tune the open-source base model"
    loss_normaliser="example",
    label_padding="row",
)
REFERENCE_EPOCHS, TARGET_EPOCHS, EXTENDED_EPOCHS = 10, 5, 8
# "Training Epochs 10 (Reference 1.7B) / 5 (Target 4B/8B)"; tab:extra-training: "extended SeqD baseline (8 epochs)"


def sdar_reference(block: int = 64) -> TrainConfig:
    """Step 1: the 1.7B reference of the small-to-large strategy."""
    return replace(SDAR, model="JetLM/SDAR-1.7B-Chat", block_length=block, epochs=REFERENCE_EPOCHS)


def sdar_target(size: str, block: int, epochs: float = TARGET_EPOCHS, carry: bool = True) -> TrainConfig:
    model = f"JetLM/SDAR-{size.upper()}-Chat"
    return replace(SDAR, model=model, block_length=block, epochs=epochs, carry=Residual() if carry else None)


def reference_only() -> Recipe:
    """The 1.7B reference of the paper's SDAR runs (step 1 alone)."""
    return Recipe("paper-sdar-1.7b-reference", None, sdar_reference())


def _rcd(size: str, block: int) -> Recipe:
    """Both stages of an SDAR run of the paper."""
    return Recipe(f"paper-sdar-{size}-b{block}", sdar_target(size, block), sdar_reference(block))


def _seqd(size: str, block: int, epochs: float = TARGET_EPOCHS) -> Recipe:
    """The SeqD baseline of the same token budget (or the extended one of tab:extra-training)."""
    name = f"seqd-sdar-{size}-b{block}" + ("-extended" if epochs != TARGET_EPOCHS else "")
    return Recipe(name, sdar_target(size, block, epochs, carry=False))


rcd_4b_b32, rcd_4b_b64 = partial(_rcd, "4b", 32), partial(_rcd, "4b", 64)
rcd_8b_b32, rcd_8b_b64 = partial(_rcd, "8b", 32), partial(_rcd, "8b", 64)
seqd_4b_b32, seqd_4b_b64 = partial(_seqd, "4b", 32), partial(_seqd, "4b", 64)
seqd_8b_b32, seqd_8b_b64 = partial(_seqd, "8b", 32), partial(_seqd, "8b", 64)
seqd_8b_b64_extended = partial(_seqd, "8b", 64, EXTENDED_EPOCHS)


def llada_8b() -> Recipe:
    """LLaDA-8B: "a standard SFT checkpoint as the reference", of the same size and on the same data."""
    return Recipe("paper-llada-8b", replace(LLADA, carry=Residual(start="reference")), LLADA)


def seqd_llada_8b() -> Recipe:
    """The LLaDA baseline of the same token budget."""
    return Recipe("seqd-llada-8b", LLADA)
