"""Pure statistics of numbers in a row: lines, shapes, intervals, spread, steps. No record is known here."""
