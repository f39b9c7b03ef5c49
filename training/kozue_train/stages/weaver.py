"""Stage `weaver`: trains the adapter on a frozen drafter and target.

Teacher forcing along the target's own text: node d holds the text's token d of the block and must
give the target's distribution of token d + 1 on the drafter's shortlist. Loss (LK): mix * KL(p || q)
+ (1 - mix) * TV(p, q), both on the shortlist, p the target's probabilities renormalised there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kozue_train.frozen import Frozen
from kozue_train.model.dflash import DFlash, load_dflash
from kozue_train.model.weaver import Weaver, WeaverConfig, load_weaver, save_weaver
from kozue_train.quantise import Format, Rounded
from kozue_train.stages.dflash import (
    AnchorBatches,
    Anchors,
    DrafterOptions,
    prepare,
    row_weights,
    training_loop,
)
from kozue_train.stages.generate import Texts


def weaver_loss(weaver: Weaver | Rounded, drafter: DFlash, target: Frozen, batch: Anchors, gamma: float, mix: float) -> dict[str, Tensor]:
    """LK loss and, beside it, the total variation of the drafter alone and of the Weaver."""
    c, w = weaver.config, drafter.config.block_size
    with torch.no_grad():
        features = target.features(batch.ids, drafter.config.target_layer_ids)
        draft = drafter(features.taps, batch.blocks[:, :, 0], batch.anchors, target.embedding)
        b, a = batch.anchors.shape
        rows = torch.arange(b, device=batch.ids.device)[:, None]
        before = features.hidden[rows, (batch.anchors - 1).clamp(min=0)]
        states = torch.cat((before.unsqueeze(2), draft[:, :, 1:]), 2).reshape(b * a, w, -1)
        head = target.head.to(draft.dtype)
        prior_all = (draft[:, :, 1:].reshape(b * a * (w - 1), -1) @ head.t()).float()
        prior, pool = prior_all.topk(c.candidate_pool_size, -1)
        del prior_all
        place = (batch.anchors[:, :, None] + torch.arange(w - 1, device=batch.ids.device)).clamp(max=batch.ids.shape[1] - 1)
        truth = features.hidden[rows.unsqueeze(-1), place].reshape(b * a * (w - 1), -1)
        rows_of_pool = head[pool]
        wanted = torch.einsum("nd,nkd->nk", truth, rows_of_pool).float()
        log_p = wanted.log_softmax(-1)
        weight = (row_weights(w, gamma, draft.device) * batch.valid[:, :, 1:]).reshape(-1)
        tokens = torch.nn.functional.embedding(batch.blocks[:, :, :-1].reshape(b * a, w - 1), target.embedding)
    query = weaver(states, tokens.to(states.dtype)).reshape(b * a * (w - 1), -1)
    log_q = (prior + torch.einsum("nd,nkd->nk", query, rows_of_pool).float()).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    total = weight.sum().clamp(min=1e-6)
    with torch.no_grad():
        tv_draft = 0.5 * (p - prior.softmax(-1)).abs().sum(-1)
    return {
        "loss": ((mix * kl + (1 - mix) * tv) * weight).sum() / total, "kl": (kl * weight).sum() / total,
        "tv": (tv * weight).sum() / total, "tv_draft": (tv_draft * weight).sum() / total,
    }


def run(options: DrafterOptions) -> dict[str, Any]:
    """Trains or goes on training; writes `out/weaver`."""
    if options.drafter is None:
        raise ValueError("a Weaver needs a trained drafter; give --drafter FOLDER")
    options.out.mkdir(parents=True, exist_ok=True)
    device, dtype, target = prepare(options)
    drafter = load_dflash(options.drafter).to(device).requires_grad_(False)
    weaver = Weaver(WeaverConfig(
        d_model=target.hidden_size, d_embed=target.embedding.shape[1], d_rank=options.rank, num_heads=options.weaver_heads, mlp_dim=options.mlp,
        K=drafter.config.block_size - 1, candidate_pool_size=min(options.pool, target.head.shape[0]), rope_base=10000.0,
    ))
    weaver.initialise(options.seed)
    if options.weaver:
        weaver = load_weaver(options.weaver)
    weaver.to(device)
    runner = Rounded(weaver, Format(options.bits)) if options.bits else weaver
    batches = AnchorBatches(Texts.load(options.texts), options, device, drafter.config.block_size, options.seed)
    return training_loop(
        options, "weaver", weaver, batches, device,
        lambda batch: weaver_loss(runner, drafter, target, batch, options.gamma, options.mix), lambda: save_weaver(weaver, options.out / "weaver"),
    )
