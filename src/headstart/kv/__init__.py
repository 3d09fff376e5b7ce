"""Page ledger, radix tree and prefix cache: who owns each page, and which tokens it holds."""
