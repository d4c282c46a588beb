from harness.cli import Mistake as Mistake
from harness.cli.theory import theory_rows as theory_rows
from harness.dataset.study import Study as Study
from harness.loading import load_results as load_results
from harness.records import ResultsError as ResultsError
from harness.records.foreign.log import LogError as LogError

__version__: str
