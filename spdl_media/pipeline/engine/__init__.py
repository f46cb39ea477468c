"""The engine of a pipeline: a graph of nodes that pass items on, and the threads that call stage functions.

A definition becomes a chain of nodes (:mod:`graph`): a source, stages and a sink. Nodes are used in *turns*
only (:mod:`hub`). One thread at a time takes a turn, so nodes need no locks. Runners (:mod:`workers`) make
the calls of a stage, in threads or in tasks: they take the slots of items one by one, make the call, and
deliver the outcome. The thread that delivers an outcome takes a turn, which moves every item that can move,
including its own next one, so no other thread has to be woken for an item. The event loop of one background
thread (:mod:`run`) serves tasks, timers and requests of the consumer, and takes turns as well. A generator is
a stage with any number of results per item, and a source is such a stage whose items are epochs.

An item occupies room in a stage from when the stage accepts it until the stage has passed its result on, and
a node accepts no more items than it has room for. So all queues are bounded, and a slow consumer slows down
the source. A stage has room for its concurrency, and for one more item that waits for a thread. When items
pass so quickly that a turn per item would cost more than the calls, only the loop takes turns, each for many
items. All nodes together then have room for 64 more items, the *slack*, so that threads can work while the
loop sleeps.
"""
