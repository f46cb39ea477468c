"""The engine of a pipeline: nodes between which one thread at a time moves items, and threads that call.

A definition becomes a chain of nodes (:mod:`graph`): a source, stages, a sink. They are used in *turns*
(:mod:`hub`), which one thread at a time takes, so none of them needs a lock. Runners (:mod:`workers`) make
the calls of a stage, in threads or in tasks: they take slots one by one, call, and deliver the outcome. The
thread that does takes a turn, which moves everything that can move, its own next item too: no other thread
need be woken for an item. Tasks, timers and what comes from the consumer are for the event loop of one
background thread (:mod:`run`), which takes turns as well. Generators are stages of any number of results,
and a source is one whose items are epochs.

An item takes up room in a stage from when the stage accepts it until it has handed its result on, and a
node accepts no more than it has room for. So everything is bounded, and a slow consumer is felt by the
source. A stage has room for its concurrency and one item that waits for a thread. While items pass so
quickly that a turn for each would cost more than they do, the loop alone takes turns, each for many items,
and all nodes together have room for 64 more: that slack is what lets threads work on while the loop sleeps.
"""
