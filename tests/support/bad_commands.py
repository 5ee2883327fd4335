"""Commands that are refused as they stand, beside a copy of `run` (see `bad_input.py`)."""

from collections.abc import Iterator

from bad_input import Case

MESSAGES = {
    "digits": {
        "--method fedpre": "unknown method 'fedpre'; did you mean fedper, fedrep or fedprox?",
        "--model cnn": "unknown model 'cnn'",
        "--networks deal.json": "--networks needs a list of networks as --model",
        "--roundz 3": "did you mean --rounds?",
        "--method fedper --lamda 3": "unknown option --lamda; did you mean --lam? It is an option of",
        "--head x": "--head is for a module of your own (--model FILE.py:NAME), not for mlp",
        "three": "unexpected word 'three': options start with --, see --help",
        "--state-on disk --distributed": "with --distributed give --state-on host",
        "--hidden 64 0": "--hidden must be at least 1 each, not 0",
        "--target-accuracy 101": "--target-accuracy is a percentage of accuracy, not 101",
        "--schedule lr=linear:0:1": "linear is linear:START:END:ROUNDS",
        "--schedule epochs=cosine": "fedpac has no real-valued hyper-parameter epochs",
        "--schedule lr=cosine lr=step:0.5:3": "--schedule lr=step:0.5:3: lr has another schedule",
        "--method fedavg --solver auto": "--solver is an option of fedpac, not of fedavg",
        "--resume run --out elsewhere": "--out cannot be given with --resume: a run goes on in its own folder",
        "--model fedpac_cnn": "images of 8x8 are too small for fedpac_cnn",
        "--devices 999": "--devices 999 is more than the 2 available",
        "--method fedavg --server-lr 0.5": "fedavg refuses its options: server_lr needs a server_optimizer",
        "--method hypcluster --server-mean median": "server_mean is for methods that send a Mean",
        "--out run": "the folder run holds a run already",
        "--out /proc/none/run": "give a folder that can be written",
        "--data my.npz": "--data is for your own data: python -m experiments.custom",
        "--task regression": "--task regression is for your own data or model",
        "--loss focal": "--loss focal is not FILE.py:NAME of a function",
        "--resume absent": "--resume absent: the folder has no run",
        "--method mine.py:mine": "cannot read mine.py: No such file or directory",
        "--zzyzx": "unknown option --zzyzx: see --help",
        "--leraning-rate 0.1": "unknown option --leraning-rate: here it is --lr",
        "--schedule lr=linear:0:1:2.5": "ROUNDS must be a whole number of at least 1, not 2.5",
        "--schedule lr=exponential:0": "FACTOR must be positive",
        "--method apfl --schedule alpha=cosine": "apfl reads alpha before the first round only",
        "--partition natural": "has no clients of its own for the partition natural",
        "--distributed --process-id 0": "are given together: --coordinator is missing",
        "--distributed --coordinator a --num-processes 2 --process-id 0": "HOST:PORT",
        "--distributed --coordinator a:1 --num-processes 2 --process-id 2": "--process-id 2 must be from 0 to 1",
        "--resume run --lr 0.5": "the run has --lr",
        "--rounds": "--rounds needs a value: a whole number",
        "--rounds half": "--rounds must be a whole number, not 'half'",
        "--hidden 3 64,32": "--hidden must be one or more of a whole number or None, not '64,32'",
        "--wandb=yes": "--wandb takes no value: give --wandb or --no-wandb",
        "--resume run --rounds 2": "the run has --rounds 3, which can only grow",
    },
    "digits --num-clients 5000": {
        "": "5000 clients with 300000 training examples in all are more than the 1287",
        "--partition iid --train-size None": "5000 clients cannot share 1287 training examples: use fewer clients",
        "--partition dirichlet": "5000 clients cannot each have 10 of the 1287 training examples",
    },
    "digits --method fedavg --client-clip 1": {
        "--schedule client_noise=cosine": "epsilon is computed for one client_noise in all rounds"
    },
    "custom --data my.csv": {
        "--client-column hospital --partition iid": "--client-column hospital and --partition iid cannot both be"
    },
    "custom --data my.npz": {
        "--task next_symbol": "--task next_symbol needs --model char_lstm, or FILE.py:NAME",
        "--source files": "--source is for the papers' data sets: custom reads --data",
        "--partition natural": "--partition natural needs --client-column",
        "": "a Hugging Face dataset's folder",
    },
    "tables --paper fedas --table 4": {"--procedure paper": "--procedure must be release, print or None, not 'paper'"},
    "custom": {"--rounds 3": "a Hugging Face dataset's folder"},
    "tables --paper fedpac --table 5 --dataset fashion_mnist": {
        "--clients 7": "unknown number of clients '7'",
        "--method fedsa": "did you mean fedpac?",
        "--setting beta=7": "unknown setting 'beta=7'",
        "--resume run": "the same command goes on where it was stopped",
        "--out run": "run is the folder of a single run: give --out another folder",
        "--distributed": "--distributed is for single runs",
    },
    "tables": {
        "--paper fedpacc --table 5": "did you mean fedpac?",
        "": "missing: --paper, --table; see --help",
        "--paper fedpac --table 5 --dataset emnist": "unknown dataset 'emnist'",
        "--paper fedpac --table 5 --procedure print": "--procedure has no effect",
        "--paper fedpac --table 5 --s=30": "--s cannot be given for a table",
        "--paper fedpac --table 5 --lam 2": "--lam is an option of",
        "--paper fedpac --table 5 --out /dev/null/table": "cannot write /dev/null/table",
    },
    "figures": {
        "--paper fedpac --figure 2 --dataset custom": "unknown dataset 'custom'",
        "--paper fedpac --figure 99": "unknown figure '99'",
        "--paper fedpac --figure 2 --participation 0.5": "--participation cannot be given for FedPAC, Figure 2",
        "--paper fedpac --figure 2 --seed 1": "--seed cannot be given for FedPAC, Figure 2, which sets it itself",
        "--paper fedpac --figure 2 --method fedas": "compares no methods",
        "--paper fedas --figure 3 --keep-state never": "--keep-state cannot be given for FedAS, Figure 3",
        "--paper fedpac --figure 2 --eval-protocol trained": "--eval-protocol has no effect on FedPAC, Figure 2",
        "--paper fedpac --figure 4 --score best": "--score has no effect on FedPAC, Figure 4",
    },
    "sweep --dataset digits": {
        "--grid eval_protocol=received,trained": "all settings are compared by the same value",
        "--grid lr": "--grid lr: give a name and its values, such as --grid lam=0.1,1,10",
        "--grid lr=0.1 --grid lr=0.2": "--grid lr is given twice: give all its values at once",
        "--grid momentun=0.1": "did you mean --momentum?",
        "--grid lr=0.1 --part 16/16": "--part 16/16: give this process's number, from 0, and how many, such as 3/16",
        "--state-on host": "its runs keep their clients' states on the devices",
        "--grid source=embedded,files": "--source cannot be in the grid: it is not a setting",
        "--grid lr=0.1 --resume run": "--resume cannot be given for a sweep: the same command goes on",
        "--grid method=fedpac --grid fedas.lam=1": "fedas is not among the methods of --grid method=",
        "--grid method=fedpac --grid lr=1,2 --grid fedpac.lr=1": "--lr is in the grid for all methods already",
        "--grid method=fedpac --grid fedpac.seed=1": "--seed cannot be given for a sweep: use --seeds",
        "--select validation": "needs validation examples: give --val-fraction",
    },
    "export": {
        "run --to model.onnx": "--to model.onnx: the name must end in .safetensors or .msgpack",
        "absent --to model.msgpack": "absent: the folder has no run",
        "run --to model.msgpack": "run: the run is not finished: --resume run continues it",
    },
    "report": {
        "": "missing: RUN...; see --help",
        "absent": "absent is not a folder: give folders of runs, or one above them",
        "run --width 3.3": "--width needs --plot",
        "run --band range": "--band needs --width",
        "run --out run": "run exists already and is not a report",
        "run --out /dev/full": "/dev/full exists already and is not a report",
        "run --plot page.txt": "--plot page.txt: the name must end in .png, .svg or .pdf",
        "run --plot x.png --out y.html": "give one of them",
        "run --dark": "unknown option --dark",
    },
    "compare": {
        "": "missing: RUN...; see --help",
        "run --out run/config.json": "the name must end in .md, .csv or .tex",
    },
    "partition": {
        "": "missing: give --to, --picture",
        "--to new.txt": "--to new.txt: the name must end in .json",
        "--to run/config.json": "run/config.json exists already",
        "--shift labels --npz new.npz": "--shift changes the examples",
    },
    "femnist": {
        "": "give --data",
        "--data nowhere": "nowhere is not there",
        "--data data --source tfds": "femnist reads --data",
    },
    "fashion_mnist": {
        "--augment": "augmentation is for color images, not for images of shape (28, 28, 1)",
        "--source files --data-dir data": "the data folder data does not exist",
    },
    "cifar100 --method fedas": {
        "--procedure release --eval-clients 2": "eval_clients cannot be given: clients of this method take turns"
    },
    "cifar10": {
        "--source tfds --data-dir data": "--data-dir) a folder that has it",
        "--resume run": "--resume run: the run is on digits, not cifar10",
    },
    "sweep --dataset custom --grid lr=0.1,0.2": {"": "a Hugging Face dataset's folder"},
    "sweep --dataset digitz": {"": "did you mean digits?"},
}
"""Beginning of a command -> its end -> part of the message."""


def cases() -> Iterator[Case]:
    """All of them."""
    for begin, messages in MESSAGES.items():
        for end, message in messages.items():
            yield Case(f"{begin} {end}".strip(), message=message)
