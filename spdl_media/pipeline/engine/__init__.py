"""The engine of a pipeline: one event loop that owns all state, and threads that only call functions.

A definition becomes a chain of nodes (:mod:`graph`): a source, stages, a sink. Nodes live on the event
loop of one background thread (:mod:`run`), so none of them needs a lock. Runners (:mod:`workers`) make
the calls of a stage, in threads or in tasks: they take slots one by one, call, and post the outcome to the
loop (:mod:`hub`), which is woken once for many outcomes and then moves everything that can move. Generators
are stages of any number of results, and a source is one whose items are epochs.

An item takes up room in a stage from when the stage accepts it until it has handed its result on, and a
node accepts no more than it has room for. So everything is bounded, and a slow consumer is felt by the
source. A stage has room for its concurrency and one item that waits for a thread. While items pass so
quickly that waking the loop would cost more than they do, all nodes together have room for 64 more: that
slack is what lets threads work on while the loop sleeps.
"""
