"""The published interfaces of four other systems, each under its own names: only the import changes.

``spec_decode_ops``, ``spec_verify``, ``spec_verify_xpu`` and ``nuvec`` are thin: names, argument orders, defaults and
shapes are those of the published systems, the law and the bits those of ``draftproof``. Import the one you need::

    import draftproof.compat.spec_decode_ops as sdo
"""
