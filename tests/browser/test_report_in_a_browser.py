"""The page as a reader has it: light and dark, wide and narrow, printed, with a keyboard alone."""

import pytest

from cmcl.report.theme import DARK, LIGHT

pytestmark = pytest.mark.browser
UNFOLD = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def axis_colour(page):
    return page.evaluate("getComputedStyle(document.querySelector('.chart .role-axis-label text')).fill")


def column(page, table, number):
    """The texts of a column, without the marks for screen readers."""
    cells = page.locator(f"#{table} tbody tr > :nth-child({number})")
    return [text.split()[0] for text in cells.all_text_contents()]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_has_no_violations_and_no_complaints(open_page, width, theme):
    """axe-core: contrast, names, roles, order of headings."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
    page = open_page(width=width, theme=theme)
    page.evaluate(UNFOLD)
    colours = LIGHT if theme == "light" else DARK
    assert (background(page), axis_colour(page)) == (rgb(colours["page"]), rgb(colours["muted"]))
    assert page.locator(".chart svg").count() > 20
    empty = page.evaluate(
        """() => [...document.querySelectorAll(".chart")].filter((place) =>
             !place.querySelector(".mark-rect path, .mark-line path, .mark-symbol path")
             || place.getBoundingClientRect().width < 60).map((place) => place.ariaLabel)"""
    )
    assert empty == []
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.problems == []


@pytest.mark.parametrize("width", [1400, 768, 400, 320])
def test_nothing_scrolls_sideways_but_tables_in_their_boxes(open_page, width):
    page = open_page(width=width)
    page.evaluate(UNFOLD)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll("main *, header *")].filter((element) =>
             !element.closest(".box, svg, .hidden") && element.getBoundingClientRect().right > innerWidth + 1
           ).map((element) => element.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    unreachable = page.evaluate(
        "[...document.querySelectorAll('.box')].filter((b) => b.scrollWidth > b.clientWidth && b.tabIndex < 0).length"
    )
    assert unreachable == 0, "a table that scrolls can be scrolled with the keyboard"


def test_on_a_phone_the_verdict_and_the_top1_error_are_in_sight(open_page):
    wide, narrow = open_page(), open_page(width=400)
    assert narrow.locator(".tile").first.bounding_box()["y"] < 600
    cells = "#table3 tbody tr:nth-child(2) > *"
    assert wide.locator(cells).all_inner_texts()[:3] == ["IE", "VGGNet-17", "CIFAR-10"]
    assert narrow.locator(cells).first.inner_text().split("\n") == ["IE", "VGGNet-17, CIFAR-10"]
    for page in (wide, narrow):
        top1 = page.locator("#summary-digits-0 tbody tr td").first.bounding_box()
        assert top1["x"] + top1["width"] < page.viewport_size["width"]
    head = narrow.locator("#table3 thead tr:last-child th").nth(3).bounding_box()
    body = narrow.locator("#table3 tbody tr:nth-child(2) td").first.bounding_box()
    assert head["x"] == body["x"], "heads stand above their columns"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_printed_tables_are_whole_and_the_paper_is_white(open_page, theme):
    page = open_page(theme=theme)
    page.emulate_media(media="print", color_scheme=theme)
    page.set_viewport_size({"width": 690, "height": 1000})  # A4 without margins
    assert (background(page), axis_colour(page)) == (rgb(LIGHT["page"]), rgb(LIGHT["muted"]))
    assert page.evaluate("document.documentElement.scrollWidth") <= 690
    styles = "[...document.querySelectorAll('{}')].map((e) => getComputedStyle(e).{})"
    assert set(page.evaluate(styles.format(".box", "overflowX"))) == {"visible"}
    assert set(page.evaluate(styles.format("h2, h3", "breakAfter"))) == {"avoid"}
    assert page.evaluate("getComputedStyle(document.querySelector('.ramp')).printColorAdjust") == "exact"
    heads = set(page.evaluate(styles.format("th button", "display")))
    assert heads == {"contents"}, "chromium repeats no button at the head of a second page"
    assert page.locator("nav").is_hidden()
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_tables_sort_by_mouse_and_keyboard(open_page):
    page = open_page()
    head = page.locator("#table1 thead tr:last-child th").nth(1)  # top-1, paper
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    numbers = list(map(float, column(page, "table1", 2)))
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 5
    for key, order in (("Enter", "descending"), ("Space", "ascending")):
        head.locator("button").focus()
        page.keyboard.press(key)
        assert head.get_attribute("aria-sort") == order
        assert list(map(float, column(page, "table1", 2))) == sorted(numbers, reverse=order == "descending")
    name = page.locator("#table1 thead tr:last-child th").first
    name.locator("button").click()
    assert (head.get_attribute("aria-sort"), name.get_attribute("aria-sort")) == ("none", "ascending")
    assert column(page, "table1", 1) == ["CMCL", "CMCL", "CMCL", "IE", "MCL"]


def test_what_is_not_measured_stays_at_the_end(open_page):
    page = open_page()
    button = page.locator("#table3 thead tr:last-child th").nth(4).locator("button")  # top-1, ours
    for _ in range(2):
        button.click()
        texts = column(page, "table3", 5)
        assert texts.count("not") == 4, "VGGNet-17 on SVHN"
        assert texts[-4:] == ["not"] * 4


def test_the_theme_follows_the_system_until_it_is_chosen_and_kept(open_page):
    page = open_page(theme="light")
    page.emulate_media(color_scheme="dark")
    assert background(page) == rgb(DARK["page"])
    page.get_by_role("button", name="Switch to the light theme").click()
    assert (background(page), axis_colour(page)) == (rgb(LIGHT["page"]), rgb(LIGHT["muted"]))
    page.reload()
    assert background(page) == rgb(LIGHT["page"])
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert background(page) == rgb(DARK["page"])
    assert page.problems == []


def test_predictions_are_filtered_and_enlarged(open_page):
    """IE is wrong on images 0 and 2, CMCL on 1 and 2."""
    page = open_page()
    part = page.locator("#pictures-digits")
    shown = lambda: [card.get_attribute("data-kind") for card in part.locator(".card:visible").all()]  # noqa: E731
    assert shown() == ["fixed"]
    part.get_by_role("button", name="broken").click()
    assert shown() == ["broken"]
    part.get_by_role("button", name="all").click()
    assert shown() == ["fixed", "broken", "both", "disputed"]
    part.locator("select").select_option(index=3)
    assert shown() == ["both"]
    part.get_by_role("button", name="Enlarge test image 2").click()
    large = page.locator("dialog img")
    assert large.is_visible()
    assert large.bounding_box()["width"] > 300
    assert "test image 2" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    assert large.is_hidden()
    assert page.problems == []


def test_a_number_leads_to_its_record_and_its_command_can_be_copied(open_page):
    page = open_page()
    record = page.locator("#recipe-cifar10-resnet20-cmcl")
    assert record.get_attribute("open") is None
    page.locator("#headline a[href='#recipe-cifar10-resnet20-cmcl']").first.click()
    assert record.get_attribute("open") is not None
    assert record.get_by_text("share_prob").is_visible()
    assert record.bounding_box()["y"] < 900, "and is in sight"
    record.get_by_role("button", name="Copy").click()
    done = record.locator(".copy")
    page.wait_for_function("(button) => button.textContent !== 'Copy'", arg=done.element_handle())
    if done.inner_text() == "Selected":
        assert page.evaluate("String(getSelection())").strip() == "cmcl train cifar10-resnet20-cmcl --seed 0"


def test_hovering_shows_values(open_page):
    page = open_page()
    page.locator("#figure1 [data-tip]").first.hover(position={"x": 3, "y": 3})
    assert page.locator("#tip").is_visible()
    assert {"accuracy", "class"} <= {
        line.split(":")[0] for line in page.locator("#tip").inner_text().split("\n")
    }
    page.mouse.move(1, 1)
    assert page.locator("#tip").is_hidden()


def test_the_keyboard_shows_where_it_is(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_without_scripts_charts_and_numbers_are_there(open_page):
    page = open_page(script=False)
    assert page.locator("#headline tbody tr").count() > 3
    assert page.locator(".chart svg").first.is_visible()
    assert page.locator(".card").first.is_visible()
    assert page.get_by_text("need JavaScript").is_visible()
    for name in ("#theme", ".filters", ".copy"):
        assert page.locator(name).first.is_hidden()


def test_names_are_shown_and_never_run(open_page):
    page = open_page()
    assert page.locator("main").get_by_text("<script>alert(1)").count() > 0
    assert page.locator("img[src=x]").count() == 0
    assert page.problems == []
