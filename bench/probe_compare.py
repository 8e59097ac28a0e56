import math, random, sys, time
import torch
from gpu_probe_step import graph_of, time_graph
from probe_paged_attention import paged_attention_triton as old_decode
from probe_prefill_old import prefill_attention_triton as old_prefill
from paceline.kernels.paged_attention import Launch, paged_attention_triton
from paceline.kernels.prefill_attention import prefill_attention_triton

HEADS, KV_HEADS, DIM, BLOCK, WIDTH, PROCESSORS = 32, 8, 128, 16, 4096, 132
warm = sys.argv[1] == "warm"
begin = time.time()

def mixed(rows, seed=0):
    rng = random.Random(seed)
    return [max(200, min(4000, int(rng.lognormvariate(math.log(800), 0.8)))) for _ in range(rows)]

W = [("mixed x64", mixed(64)), ("mixed x32", mixed(32)), ("mixed x16", mixed(16))]
W += [(f"{c}x{r}", [c] * r) for c, r in ((3000, 1), (3000, 8), (1024, 16), (3000, 32), (1024, 32), (1024, 64), (256, 32), (256, 64), (256, 128), (256, 256), (3000, 2), (3000, 4), (3000, 16), (1024, 1), (1024, 4))]
W += [("mixed x192", mixed(192)), ("mixed x128", mixed(128))]
if warm:
    W = [("3x128", [3] * 128), ("3x2", [3] * 2), ("3x64", [3] * 64)]

def prefills():
    for sequences, new, context in ((1, 8192, 20000), (64, 128, 0), (4, 1000, 1500)) if not warm else ((1, 8, 8),):
        per = -(-(new + context) // BLOCK)
        k, v = (torch.randn(sequences * per, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(sequences * per, device="cuda").int().view(sequences, per)
        q = torch.randn(sequences * new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        bounds = torch.arange(0, sequences * new + 1, new, device="cuda", dtype=torch.int32)
        contexts = torch.full((sequences,), context, device="cuda", dtype=torch.int32)
        line = []
        for name, f, a in (("old", old_prefill, ()), ("s3", prefill_attention_triton, (128, 8, 3)), ("s4", prefill_attention_triton, (128, 8, 4)), ("r64s2", prefill_attention_triton, (64, 4, 2))):
            line.append(f"{name} {time_graph(graph_of(lambda: f(q, k, v, table, bounds, contexts, *a)), repeats=3, inner=2)[0]:.4f}")
        print(f"prefill {sequences}x{new}+{context} ms", *line, flush=True)

prefills()
for name, lengths in W:
    if time.time() - begin > float(sys.argv[2]):
        print("out of time at", name)
        break
    rows, tokens = len(lengths), sum(lengths)
    layers = max(2, min(12, 4_000_000_000 // (tokens * 4096)))
    blocks = [-(-(n + 1) // BLOCK) for n in lengths]
    caches = [[torch.empty(sum(blocks), BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2)] for _ in range(layers)]
    order, used = torch.randperm(sum(blocks)).int(), 0
    table = torch.zeros(rows, WIDTH // BLOCK, dtype=torch.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = order[used : used + count]
        used += count
    table = table.cuda()
    q = torch.randn(rows, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    contexts = torch.tensor(lengths, device="cuda", dtype=torch.int32)

    def timed(attend, *args):
        def run():
            for k, v in caches:
                attend(q, k, v, table, contexts, *args)
        return time_graph(graph_of(run), repeats=3, inner=3)[0] / layers * 1e3

    tiles = rows * KV_HEADS
    launches = {"default": None}
    for fill in (1, 2, 4, 8, 16):
        programs = max(1, min(WIDTH // 256, fill * PROCESSORS // tiles))
        for stages in (3, 4) if programs == 1 else (2, 3):
            launches[f"P{programs}s{stages}"] = Launch(programs, stages)
    expected = old_decode(q, *caches[0], table, contexts).float()
    line = [f"old {timed(old_decode):.1f}"]
    outs = []
    for label, launch in launches.items():
        out = paged_attention_triton(q, *caches[0], table, contexts, launch)
        outs.append(out)
        error = (out.float() - expected).norm() / expected.norm()
        same = torch.equal(out, outs[0])
        line.append(f"{label}{'' if error < 1e-2 and same else f' WRONG {error:.1e} {same}'} {timed(paged_attention_triton, launch):.1f}")
    print(f"{name} ideal {tokens * 4096 / 4.575e6:.1f}", " | ".join(line), flush=True)
print(f"{time.time() - begin:.1f} s")
