"""What others use to check an implementation: cases, targets, laws, reports (docs/corpus.md)."""
