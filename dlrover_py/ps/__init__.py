"""The parameter server: tables that outgrow one node, on servers that may be lost."""
