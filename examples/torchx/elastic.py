"""A job of nodes that come and go, as a component of TorchX.

torchx run -s SCHEDULER elastic.py:elastic --etcd etcd1:2379 --nodes 4 --script train.py -- --lr 1

TorchX starts the nodes, which meet in etcd: there is no head node, and no port to choose.
"""

from torchx import specs


def elastic(
    *script_args: str,
    etcd: str,
    script: str,
    nodes: int = 2,
    nnodes: str = "1:2",
    nproc_per_node: str = "1",
    job: str = specs.macros.app_id,
    image: str = "registry.example.com/elastic-etcd/node",
    cpu: int = 2,
    gpu: int = 0,
    memory: int = 4096,
    retries: int = 3,
) -> specs.AppDef:
    """Runs a script on nodes that come and go.

    Args:
        script_args: the script's
        etcd: where etcd is: HOST:PORT,...
        script: in the image, or below the current directory
        nodes: how many nodes the scheduler starts
        nnodes: how many train, as MIN:MAX
        nproc_per_node: a number, or gpu
        job: the training job's id; by default that of the scheduler
        image: one with elastic_etcd in it
        cpu: of each node
        gpu: of each node
        memory: of each node, in MB
        retries: how often the scheduler replaces a node, where it can
    """
    flags = ["--etcd", etcd, "--job", job, "--nnodes", nnodes, "--nproc-per-node", nproc_per_node]
    named = ["--node-name", f"node{specs.macros.replica_id}"]
    role = specs.Role(
        name="node",
        image=image,
        entrypoint="python",
        args=["-m", "elastic_etcd.launch", *flags, *named, script, *script_args],
        num_replicas=nodes,
        max_retries=retries,
        retry_policy=specs.RetryPolicy.REPLICA,  # the other nodes train on
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory),
    )
    return specs.AppDef(name="elastic", roles=[role])
