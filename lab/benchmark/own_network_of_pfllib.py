"""Rounds of FedAvg and FedPer: PFLlib's own, and pfl_jax's with the built-in network and with PFLlib's network by from_torch."""
import json, os, subprocess, sys, tempfile, time, statistics
from pathlib import Path
os.environ.setdefault("XLA_FLAGS","--xla_force_host_platform_device_count=2")
import jax, numpy as np
from experiments.host import jax_config
from pfl_jax import models, networks, simulate, data as D
from pfl_jax.data import partition, federated
from pfl_jax.methods import make_method
sys.path.insert(0, "PFLlib/system")
from lab.benchmark import torch_rounds, workload
from lab.benchmark.jax_rounds import everywhere
import torch
from flcore.trainmodel.models import FedAvgCNN
METHOD, CL, EX, COHORT, R = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
dataset = workload.dataset()
part = partition.grouped(dataset, CL, s=20, seed=0, train_size=EX, test_size=10)
fed = federated.federate(dataset, part)
shape = dataset.input_shape
mesh = simulate.client_mesh()
def ours(model, drop_last):
    m = make_method(METHOD.lower(), model, lr=.01, momentum=0.0, weight_decay=0.0, batch_size=50, epochs=1, drop_last=drop_last)
    settings = simulate.Settings(rounds=1, participation=COHORT/CL, chunk=1)
    engine = simulate.build(m, settings, mesh).jit(mesh, donate=True)
    d = everywhere(mesh, fed)
    state = everywhere(mesh, engine.init(d, jax.random.key(0)))
    run = engine.round.lower(d, state, COHORT).compile()
    box = [state]
    def round():
        box[0], _ = jax.block_until_ready(run(d, box[0]))
    return round, state
built = models.fedavg_cnn(shape, 10)
runs = {"pfl_jax": ours(built, False)[0], "pfl_jax, from_torch": ours(networks.from_torch(lambda s: FedAvgCNN(1,10,1024), shape, 10, head="fc"), False)[0]}
if EX % 50: runs["pfl_jax, from_torch, drop_last"] = ours(networks.from_torch(lambda s: FedAvgCNN(1,10,1024), shape, 10, head="fc"), True)[0]
folder = Path(tempfile.mkdtemp())
(folder/"job.json").write_text(json.dumps({"method":METHOD,"clients":CL,"cohort":COHORT,"batch_size":50,"lr":.01,"fixed_order":False,"pfllib":str(Path("PFLlib").resolve())}))
rows = np.asarray(fed.train_index)[:, :EX]
x, y = np.asarray(fed.x), np.asarray(fed.y)
np.savez(folder/"clients.npz", x=x, y=y, rows=rows, mean=np.float32(.5), std=np.float32(.5))
p = models.fedavg_cnn(shape,10).init(jax.random.key(0))
np.savez(folder/"start.npz", *[w.detach().numpy() for w in FedAvgCNN(1,10,1024).parameters()])
process = subprocess.Popen([sys.executable, "lab/benchmark/peer.py", "PFLlib", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ|{"CUDA_VISIBLE_DEVICES":""})
def wait():
    line = process.stdout.readline()
    if not line: print((folder/"log.txt").read_text()[-2000:]); sys.exit(1)
def peer():
    process.stdin.write("go\n"); process.stdin.flush(); wait()
wait()
runs["PFLlib"] = peer
for r in runs.values(): r()
times = {n: [] for n in runs}
for _ in range(R):
    for n, r in runs.items():
        a=time.perf_counter(); r(); times[n].append(time.perf_counter()-a)
print(jax.__version__, METHOD, CL, EX, COHORT, {n: (round(statistics.median(t),3), [round(s,3) for s in t]) for n,t in times.items()})
process.kill()
