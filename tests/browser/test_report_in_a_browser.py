"""The page as a reader has it: drawn, sortable, light and dark, wide and narrow, with a keyboard alone."""

import pytest

from cmcl.report.theme import DARK, LIGHT

pytestmark = pytest.mark.browser


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def column(page, table, number):
    """The texts of a column, without the marks for screen readers."""
    cells = page.locator(f"#{table} tbody tr > :nth-child({number})")
    return [text.split()[0] for text in cells.all_inner_texts()]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_page_is_drawn_without_complaint(open_page, width, theme):
    page = open_page(width=width, theme=theme)
    charts = page.locator("[data-chart]")
    assert charts.count() > 20
    empty = page.evaluate(
        """() => [...document.querySelectorAll("[data-chart]")].filter((place) => {
             const drawn = place.querySelector("svg");
             const marks = drawn?.querySelectorAll(".mark-rect path, .mark-line path, .mark-symbol path");
             return !marks?.length || drawn.getBoundingClientRect().width < 60;
           }).map((place) => place.dataset.chart)"""
    )
    assert empty == []
    assert page.problems == []
    assert background(page) == rgb((LIGHT if theme == "light" else DARK)["page"])


@pytest.mark.parametrize("width", [1280, 768, 375, 320])
def test_nothing_scrolls_sideways_but_tables_in_their_boxes(open_page, width):
    page = open_page(width=width)
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll("main *")].filter((element) =>
             !element.closest(".box, svg, .hidden") && element.getBoundingClientRect().right > innerWidth + 1
           ).map((element) => element.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    wide = page.evaluate(
        "[...document.querySelectorAll('.box')].filter((b) => b.scrollWidth > b.clientWidth).length"
    )
    assert wide > 0 or width > 1000


def test_on_a_phone_the_keys_of_a_row_stand_together(open_page):
    wide, narrow = open_page(), open_page(width=375)
    cells = "#table3 tbody tr:nth-child(2) > *"
    assert wide.locator(cells).all_inner_texts()[:3] == ["VGGNet-17", "CIFAR-10", "IE"]
    shown = [text for text in narrow.locator(cells).all_inner_texts() if text]
    assert shown[0].split("\n") == ["VGGNet-17", "CIFAR-10, IE"]
    head = narrow.locator("#table3 thead tr:last-child th").nth(3).bounding_box()
    body = narrow.locator("#table3 tbody tr:nth-child(2) td").first.bounding_box()
    assert head["x"] == body["x"], "heads stand above their columns"


def test_tables_sort_by_mouse(open_page):
    page = open_page()
    head = page.locator("#summary thead th", has_text="Top-1")
    place = page.locator("#summary thead th").all_inner_texts().index(head.inner_text()) + 1
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    numbers = list(map(float, column(page, "summary", place)))
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 5
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert list(map(float, column(page, "summary", place))) == sorted(numbers, reverse=True)
    name = page.locator("#summary thead th").first
    name.locator("button").click()
    assert (head.get_attribute("aria-sort"), name.get_attribute("aria-sort")) == ("none", "ascending")
    texts = page.locator("#summary tbody th").all_inner_texts()
    assert texts.index("digits-cmcl") < texts.index("digits-ie") < texts.index("shapes-cmcl")


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_tables_sort_by_keyboard(open_page, key):
    page = open_page()
    head = page.locator("#table1 thead tr:last-child th").nth(4)  # top-1, paper
    head.locator("button").focus()
    page.keyboard.press(key)
    assert head.get_attribute("aria-sort") == "ascending"
    numbers = list(map(float, column(page, "table1", 5)))
    assert numbers == sorted(numbers)


def test_what_is_not_measured_stays_at_the_end(open_page):
    page = open_page()
    button = page.locator("#table3 thead tr:last-child th").nth(7).locator("button")  # top-1, ours
    for _ in range(2):
        button.click()
        texts = column(page, "table3", 8)
        assert texts.count("not") == 4, "VGGNet-17 on SVHN"
        assert texts[-4:] == ["not"] * 4


def test_the_theme_can_be_chosen_and_is_kept(open_page):
    page = open_page(theme="light")
    toggle = page.get_by_role("button", name="Switch to the dark theme")
    toggle.click()
    page.wait_for_selector("html[data-drawn='dark']")
    assert background(page) == rgb(DARK["page"])
    axis = page.evaluate("document.querySelector('[data-chart] .role-axis-label text').getAttribute('fill')")
    assert axis == DARK["muted"], "charts follow"
    page.reload()
    page.wait_for_selector("html[data-drawn='dark']")
    page.get_by_role("button", name="Switch to the light theme").click()
    page.wait_for_selector("html[data-drawn='light']")
    assert background(page) == rgb(LIGHT["page"])
    assert page.problems == []


def test_the_theme_follows_the_system(open_page):
    page = open_page(theme="light")
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-drawn='dark']")
    assert background(page) == rgb(DARK["page"])


def test_a_number_leads_to_its_record(open_page):
    page = open_page()
    record = page.locator("#recipe-cifar10-resnet20-cmcl")
    assert record.get_attribute("open") is None
    page.locator("#headline a[href='#recipe-cifar10-resnet20-cmcl']").first.click()
    assert record.get_attribute("open") is not None
    assert record.get_by_text("share_prob").is_visible()
    assert record.bounding_box()["y"] < 900, "and is in sight"


def test_hovering_shows_values(open_page):
    page = open_page()
    page.locator("[data-chart='figure1-0'] .mark-rect path").first.hover(position={"x": 3, "y": 3})
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert "accuracy" in tip.inner_text()
    assert "airplane" in tip.inner_text()


def test_the_keyboard_reaches_everything_and_shows_where_it_is(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert style == "solid"
    unreachable = page.evaluate(
        """[...document.querySelectorAll(".box")].filter((b) => b.scrollWidth > b.clientWidth && b.tabIndex < 0).length"""
    )
    assert unreachable == 0, "a table that scrolls can be scrolled with the keyboard"


def test_without_scripts_the_numbers_are_there(open_page):
    page = open_page(script=False)
    assert page.locator("#headline tbody tr").count() > 3
    assert page.get_by_text("Charts and sorting need JavaScript").is_visible()
    assert page.locator("#theme").is_hidden()


def test_names_are_shown_and_never_run(open_page):
    page = open_page()
    assert page.locator("main").get_by_text("<script>alert(1)").count() > 0
    assert page.locator("img[src=x]").count() == 0
    assert page.problems == []
