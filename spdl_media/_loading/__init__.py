"""What the functions of ``load`` are made of: batches with failures, crops, and threads for asyncio."""
