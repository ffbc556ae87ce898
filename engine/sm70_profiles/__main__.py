"""`python -m sm70_profiles` is `sm70-profiles`."""

from sm70_profiles.cli import main

raise SystemExit(main())
