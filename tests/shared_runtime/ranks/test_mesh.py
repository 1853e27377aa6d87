"""Names and coordinates of ranks."""

from shared_runtime.ranks.mesh import Mesh, rank_specs


def test_tensor_parallel_ranks_are_neighbours_and_ulysses_ranks_apart() -> None:
    mesh = Mesh(tp=2, ulysses=2)
    assert mesh.world_size == 4
    assert [(mesh.index("ulysses", r), mesh.index("tp", r)) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert mesh.groups("tp") == ((0, 1), (2, 3))
    assert mesh.groups("ulysses") == ((0, 2), (1, 3))


def test_every_rank_is_in_exactly_one_group_of_an_axis() -> None:
    for tp in (1, 2, 4):
        for ulysses in (1, 2, 4):
            mesh = Mesh(tp, ulysses)
            for axis in ("tp", "ulysses"):
                members = [rank for group in mesh.groups(axis) for rank in group]  # type: ignore[arg-type]
                assert sorted(members) == list(range(mesh.world_size))


def test_ranks_are_named_by_the_axes_that_they_differ_on() -> None:
    def names(role: str, mesh: Mesh) -> list[str]:
        return [spec.name for spec in rank_specs(role, mesh, ("cpu",) * mesh.world_size)]

    assert names("encoder", Mesh()) == ["encoder-tp0"]
    assert names("encoder", Mesh(tp=2)) == ["encoder-tp0", "encoder-tp1"]
    assert names("diffusion", Mesh(ulysses=2)) == ["diffusion-u0", "diffusion-u1"]
    assert names("diffusion", Mesh(tp=2)) == ["diffusion-tp0", "diffusion-tp1"]
    assert names("diffusion", Mesh(2, 2))[2] == "diffusion-u1-tp0"
