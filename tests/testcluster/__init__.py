"""A real Kubernetes cluster inside one Linux machine, for tests and for the demonstration.

Every program of the cluster is real and built from its Go module (Kubernetes, etcd,
containerd, CNI plugins, CoreDNS, helm); only the GPUs are fakes, and named so. How it
is made, what it cannot do and what it costs: docs/testing/cluster.md.

For tests, a session's one cluster comes from the fixtures in `testcluster.fixtures`::

    def test_something(cluster: Cluster) -> None:
        cluster.kubectl("apply", "-f", "-", stdin=manifest)     # str; raises CommandError with kubectl's words
        cluster.apply({"apiVersion": ..., "kind": ...})         # server-side, one object or several
        pod = cluster.get("pod", "name", namespace="default")   # dict, or None if there is none
        cluster.helm("install", ...)                            # helm v4, same rules as kubectl

Otherwise::

    from testcluster.cluster import Cluster
    from testcluster.options import GpuSource, Options

    cluster = Cluster.named("demo", Options(images=(archive,), audit_log=True))
    cluster.up()            # starts what does not run; also heals every fault below
    cluster.kubeconfig      # Path; `environment()` is os.environ with KUBECONFIG and PATH set for kubectl, helm
    cluster.nodes           # ("node-1", "node-2"); cluster.node_folder("node-1") is that node's /var/lib
    cluster.load_image(archive)                     # an OCI archive, onto the nodes of a running cluster
    cluster.raw("/readyz"), cluster.status()        # GET as the administrator; which daemons run
    cluster.freeze("hub", "kube-apiserver")         # SIGSTOP … `thaw`
    cluster.kill("node-1", "kubelet")               # … `up`
    cluster.crash("node-2")                         # power cut … `up`
    cluster.partition("node-2")                     # cable pulled … `heal`
    cluster.break_gpus("node-1", 0, 2)              # exactly these are sick; none: all are well
    cluster.run("node-1", "ps", "ax")               # a command inside a machine
    cluster.down()          # leaves only D/logs

The machines are `hub` (etcd, kube-apiserver, kube-controller-manager, kube-scheduler, coredns,
volumes) and `node-N` (containerd, kubelet, kube-proxy, gpu-plugin). With `audit_log` set,
`testcluster.audit` reads who did what from `cluster.audit_log`. `testcluster.target` hides the
difference between this cluster, kind and the current kubeconfig.

The same on the command line: `PYTHONPATH=tests .venv/bin/python -m testcluster --help`.
This module imports nothing, so that the daemons in the package start fast.
"""
