"""Adapts Keras to tf.distribute; the only place of the private names of Keras and TensorFlow.

Each function names the problem, its upstream thread if there is one, and its solution. Patches of
the whole process are context managers, and `patches.patch_keras_for` enters those that a strategy
needs. `make check-upstream` tells which of them the installed Keras no longer needs.
Tested with Keras 3.15.1 and TensorFlow 2.21.
"""
