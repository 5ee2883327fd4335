"""Steps per second of an epoch, networks of users, with and without pool_first, one core"""
import os, sys, time, statistics
os.environ["XLA_FLAGS"]="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import jax, jax.numpy as jnp, flax.linen as nn
from pfl_jax import networks, models
from pfl_jax.fast import rewrite
import pfl_jax.fast.order as order
real = rewrite.pool_first
class Flax(nn.Module):
    sizes: tuple; pads: tuple
    @nn.compact
    def __call__(self, x):
        for c,(k,p) in zip(self.sizes,self.pads): x=nn.max_pool(nn.relu(nn.Conv(c,(k,k),padding=p)(x)),(2,2),(2,2))
        x=x.reshape(x.shape[0],-1); x=nn.relu(nn.Dense(self.width if hasattr(self,'width') else 512)(x))
        return nn.Dense(10,name="head")(x)
cases={"fedavg_cnn":("fedavg_cnn",(32,64),((5,0),(5,0)),16)}
def step_fn(model, B, shape):
    def loss(p,x,y):
        z=model.classify(p["head"],model.features(p["backbone"],x)); return -jax.nn.log_softmax(z)[jnp.arange(B),y].mean()
    @jax.jit
    def epoch(p,x,y):
        def step(p,i):
            g=jax.grad(loss)(p,x[i],y[i]); return jax.tree.map(lambda a,b:a-.01*b,p,g),None
        return jax.lax.scan(step,p,jnp.arange(10))[0]
    return epoch
NAME=sys.argv[1]
def main(B=50, shape=(28,28,1)):
    x=jax.random.normal(jax.random.key(0),(10,B,*shape)); y=jax.random.randint(jax.random.key(1),(10,B),0,10)
    todo={}
    built=models.MODELS[NAME](shape,10)
    todo["built in"]=built
    from lab.benchmark import torch_rounds
    module=torch_rounds.Network(built.init(jax.random.key(0)), NAME).cpu()
    progs={}
    for name in ("built in","torch","torch first"):
        rewrite.pool_first = real if "first" in name else (lambda j: j)
        rewrite._call.cache_clear(); jax.clear_caches()
        if name=="built in": m=built
        elif "torch" in name: m=networks.from_torch(module, shape,10,head="head")
        else: m=networks.from_flax(Flax((32,64),((5,"VALID"),(5,"VALID"))),shape,10,head="head")
        p=m.init(jax.random.key(0)); f=step_fn(m,B,shape); c=f.lower(p,x,y).compile(); progs[name]=(c,p)
        jax.block_until_ready(c(p,x,y))
    t={n:[] for n in progs}
    for r in range(15):
        for n,(c,p) in progs.items():
            a=time.perf_counter(); jax.block_until_ready(c(p,x,y)); t[n].append((time.perf_counter()-a)*100)
    print(NAME,jax.__version__, shape, B, {n:(round(statistics.median(v),2), round(min(v),2)) for n,v in t.items()})
main()
