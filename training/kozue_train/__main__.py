"""`python -m kozue_train`."""

import sys

from kozue_train.cli import main

sys.exit(main())
