"""The history of every cell: records -> nights -> steps -> a page."""
