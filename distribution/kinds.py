"""Names the kind of a strategy of TensorFlow, and tells what its replicas share."""

import tensorflow as tf

KINDS = {  # a MultiWorkerMirroredStrategy is not a MirroredStrategy
    "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,
    "mirrored": tf.distribute.MirroredStrategy,
    "central_storage": tf.distribute.experimental.CentralStorageStrategy,
    "parameter_server": tf.distribute.ParameterServerStrategy,
}
SHARED_WEIGHTS = ("central_storage", "parameter_server")  # one copy for all replicas


def name_of(strategy: tf.distribute.Strategy) -> str:
    """Returns the name of a strategy, a `cluster.Strategy`."""
    return next((name for name, kind in KINDS.items() if isinstance(strategy, kind)), "none")
