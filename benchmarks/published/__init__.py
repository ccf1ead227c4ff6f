"""Published throughput tables, predicted with the project's own cost model."""
