"""What runs a pipeline: one event loop that owns all state, and threads that only call functions.

A definition becomes a chain of nodes (:mod:`graph`): a source, stages, a sink. Nodes live on the event
loop of one background thread (:mod:`run`), so none of them needs a lock. Worker threads (:mod:`workers`)
pull items one by one from a stage, call its function, and post the outcome to the loop (:mod:`hub`),
which is woken once for many outcomes and then moves everything that can move.

An item takes up room in a stage from when the stage accepts it until it has handed its result on, and a
node accepts no more than it has room for. So everything is bounded, and a slow consumer is felt by the
source. A stage has room for its concurrency and for a share of 64 items that all nodes have together:
that slack is what lets threads work on while the loop sleeps.
"""
